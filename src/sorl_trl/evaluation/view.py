"""The command of `sorl_trl.viewer`, under the name that evaluations have it by."""

import sys

from sorl_trl.command_line import run_command
from sorl_trl.viewer.command import main

if __name__ == "__main__":
    sys.exit(run_command(main))
