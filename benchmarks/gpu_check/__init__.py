"""Every check that needs a GPU: `python -m benchmarks.gpu_check`. What each one checks: docs/evidence/what_has_been_run.md."""
