"""Every check that needs a GPU: `python -m benchmarks.gpu_check`. What each one checks: docs/gpu.md."""
