"""A search agent learns to search again: offline, on real facts, on a laptop's CPU, in minutes.

`sorl quickstart` is the same command (`src/sorl_trl/cli/quickstart.py`).
"""

from __future__ import annotations

import sys

from sorl_trl.cli.quickstart import main
from sorl_trl.command_line import run_command

if __name__ == "__main__":
    sys.exit(run_command(main))
