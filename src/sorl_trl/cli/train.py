"""What trains an agent: parse, build, train. `train.py` and `sorl train` launch this."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sorl_trl.command_line import mistakes, run_command
from sorl_trl.recipe import build_trainer, parse_arguments, write_settings
from sorl_trl.trainers import SOPPOTrainer


def main(words: Sequence[str] | None = None) -> None:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # `rollout_func` is: that is why TRL is pinned
    with mistakes():
        arguments = parse_arguments(words)
        trainer = build_trainer(arguments)
    folder = trainer.args.output_dir
    if trainer.accelerator.is_main_process:
        write_settings(arguments, Path(folder))
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model(folder)
    trainer.save_state()
    trainer.accelerator.print(f"The policy is in {folder}: a plain checkpoint, load it as any other.")
    if isinstance(trainer, SOPPOTrainer):
        trainer.accelerator.print(f"Its critic is in {folder}/critic: `sorl_trl.load_critic({folder!r})` loads it.")
    trainer.end()


if __name__ == "__main__":
    sys.exit(run_command(main, called="sorl train"))
