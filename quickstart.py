"""A search agent learns to search again: offline, on real facts, on a laptop's CPU, in minutes."""

from __future__ import annotations

import sys

from examples.quickstart.demo import main

from sorl_trl.command_line import run_command

if __name__ == "__main__":
    sys.exit(run_command(main))
