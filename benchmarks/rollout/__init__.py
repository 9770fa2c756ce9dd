"""What a rollout costs: `python -m benchmarks.rollout`."""
