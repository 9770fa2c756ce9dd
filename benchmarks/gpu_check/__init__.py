"""Every check that needs a GPU: `python -m benchmarks.gpu_check`. See docs/evidence/what_has_been_run.md."""
