"""Rollouts for trainers: the collector as a `rollout_func`, generation with vLLM, and safeguards for TRL's tools."""
