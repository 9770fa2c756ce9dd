"""Train a search agent: `accelerate launch train.py --config recipes/so_grpo.yaml`.

`trainer` and `method` say how. Every field of `TaskArguments`, of `RolloutArguments` and `SearchArguments`, of that
trainer's config (`SOGRPOConfig` or `SOPPOConfig`) and of TRL's `ModelConfig` can stand in the recipe and be overridden
on the command line. `--help` lists those that matter first, `--help all` all, and with `--trainer so_ppo` all those of
SO-PPO. `--dry_run` builds everything, asks the policy two questions, and says what a step would do. A mistake is one
line; SORL_DEBUG=1 shows its traceback.

`sorl train` launches the same: `src/sorl_trl/cli/train.py`.
"""

from __future__ import annotations

import sys

from sorl_trl.cli.train import main
from sorl_trl.command_line import run_command

if __name__ == "__main__":
    sys.exit(run_command(main))
