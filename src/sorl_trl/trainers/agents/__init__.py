"""How the policy acts: the collector as a `rollout_func`, generation through vLLM, and TRL's own tool loop."""
