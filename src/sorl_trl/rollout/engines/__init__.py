"""What samples from the policy: models in this process, in lock-step or in slots, and vLLM."""
