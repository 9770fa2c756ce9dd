"""Train a search agent: `accelerate launch train.py --config recipes/so_grpo.yaml`.

`trainer` says which method trains it. Every field of `TaskArguments`, of `RolloutArguments` and `SearchArguments`, of
that trainer's config (`SOGRPOConfig` or `SOPPOConfig`) and of TRL's `ModelConfig` can stand in the recipe and be
overridden on the command line. `--help` lists them, with `--trainer so_ppo --help` for SO-PPO. A mistake in them ends
the command with one line and exit code 2; `--debug` shows its traceback.

It parses, builds a trainer and trains: `src/sorl_trl/cli/train.py`, which `sorl train` launches as well.
"""

from __future__ import annotations

import sys

from sorl_trl.cli.train import main
from sorl_trl.command_line import run_command

if __name__ == "__main__":
    sys.exit(run_command(main))
