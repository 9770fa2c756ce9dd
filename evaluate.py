"""Evaluate a checkpoint.

    python evaluate.py RUN --questions questions.jsonl

`sorl evaluate` is the same command, without a clone; `src/sorl_trl/cli/evaluate.py` has both.
"""

from __future__ import annotations

import sys

from sorl_trl.cli.evaluate import main
from sorl_trl.command_line import run_command

if __name__ == "__main__":
    sys.exit(run_command(main))
