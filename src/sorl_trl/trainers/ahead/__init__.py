"""Rollouts ahead of training: while one batch is trained on, the next ones are sampled. See docs/async.md."""
