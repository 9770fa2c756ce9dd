import sys

from sorl_trl.command_line import run_command
from sorl_trl.viewer.command import main

if __name__ == "__main__":
    sys.exit(run_command(main))
