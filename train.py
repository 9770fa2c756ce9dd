"""Train a search agent: `accelerate launch train.py --config recipes/so_grpo.yaml`.

`trainer` says which method trains it. Every field of `TaskArguments`, of `RolloutArguments` and `SearchArguments`, of
that trainer's config (`SOGRPOConfig` or `SOPPOConfig`) and of TRL's `ModelConfig` can stand in the recipe and be
overridden on the command line. `--help` lists them, with `--trainer so_ppo --help` for SO-PPO.
"""

from __future__ import annotations

import os

from sorl_trl import SOPPOTrainer
from sorl_trl.recipe import build_trainer, parse_arguments


def main() -> None:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # `rollout_func` is: that is why TRL is pinned
    trainer = build_trainer(parse_arguments())
    folder = trainer.args.output_dir
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model(folder)
    trainer.save_state()
    trainer.accelerator.print(f"The policy is in {folder}: a plain checkpoint, load it as any other.")
    if isinstance(trainer, SOPPOTrainer):
        trainer.accelerator.print(f"Its critic is in {folder}/critic: `sorl_trl.load_critic({folder!r})` loads it.")
    trainer.end()


if __name__ == "__main__":
    main()
