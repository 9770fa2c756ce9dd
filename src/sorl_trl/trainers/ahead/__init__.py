"""Rollouts ahead of training: samples the next batches while one is trained on. See docs/async.md."""
