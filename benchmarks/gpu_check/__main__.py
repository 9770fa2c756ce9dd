"""`python -m benchmarks.gpu_check`."""

import sys

from benchmarks.gpu_check.command import main

if __name__ == "__main__":
    sys.exit(main())
