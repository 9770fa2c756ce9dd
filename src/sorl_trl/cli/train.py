"""The training command: parses, builds, trains. `train.py` and `sorl train` launch it.

With `--dry_run`, it builds the same, asks the policy two questions, says what one step would do, and ends.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from sorl_trl.cli.interrupt import interruptible
from sorl_trl.cli.main import shows_page
from sorl_trl.command_line import UserMistake, mistakes, run_command
from sorl_trl.files import full_disk_is_said


def main(words: Sequence[str]) -> int:
    """Train, and return the exit code."""
    if shows_page("train", words):
        return 0
    from sorl_trl.diagnostics.callbacks import whole_lines

    with whole_lines():
        return _train(words)


def _train(words: Sequence[str]) -> int:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # `rollout_func` is experimental, so TRL is pinned
    # Imported here, because it takes seconds, during which Ctrl-C should show no traceback either.
    from sorl_trl.agents.vllm import EngineUnavailable
    from sorl_trl.cli.dry_run import run_table, show, try_out
    from sorl_trl.cli.output_folder import check_output_folder
    from sorl_trl.diagnostics import CollapseGuard
    from sorl_trl.recipe.arguments import parse_arguments
    from sorl_trl.recipe.build import build_trainer
    from sorl_trl.recipe.written import RecipeWriter
    from sorl_trl.search import MalformedResponse
    from sorl_trl.trainers import SOPPOTrainer

    with mistakes():
        arguments = parse_arguments(words)
        if arguments.trainer.dry_run:
            try_out(arguments)
            return 0
        check_output_folder(arguments)
        trainer = build_trainer(arguments)
    folder = trainer.args.output_dir
    writer = RecipeWriter(arguments)
    trainer.add_callback(writer)
    show(run_table(arguments, trainer), trainer)
    with interruptible(trainer):
        try:
            trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
        except EngineUnavailable as error:
            raise UserMistake(str(error)) from error
        except MalformedResponse as error:
            raise ConnectionError(str(error)) from error  # each process reports it, because others may not have met it
        finally:
            if trainer.state.global_step == 0:
                writer.take_back()
    if any(isinstance(each, CollapseGuard) and each.is_broken for each in trainer.callback_handler.callbacks):
        raise UserMistake(f"no policy is saved, for training met NaN: {folder} has the checkpoints before")
    with full_disk_is_said(Path(folder)):
        trainer.save_model(folder)
    trainer.save_state()
    trainer.accelerator.print(f"The policy is in {folder}: a plain checkpoint, load it as any other.")
    if isinstance(trainer, SOPPOTrainer):
        trainer.accelerator.print(f"Its critic is in {folder}/critic: `sorl_trl.load_critic({folder!r})` loads it.")
    named = shlex.quote(str(folder))
    trainer.accelerator.print(f"Next: sorl evaluate {named}   sorl view {named}")
    trainer.end()
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
