"""A search agent learns to search again: offline, on real facts, on a laptop's CPU, in minutes.

`sorl quickstart` is the same command (`src/sorl_trl/cli/quickstart.py`), but for where it writes: this one writes to
`runs/` of the clone, from wherever it is started.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from sorl_trl.cli.quickstart import main
from sorl_trl.command_line import run_command

if __name__ == "__main__":
    sys.exit(run_command(partial(main, home=Path(__file__).parent)))
