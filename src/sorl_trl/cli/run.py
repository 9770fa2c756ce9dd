"""One training run: builds the trainer, trains, and saves policy and recipe in the run's own folder."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainingArguments

from sorl_trl.cli.arguments import Arguments, parse_arguments
from sorl_trl.cli.build import build_trainer
from sorl_trl.cli.dry_run import run_table, show, try_out
from sorl_trl.command_line import INTERRUPTED, UserMistake, mistakes, package_version
from sorl_trl.diagnostics.callbacks import CollapseGuard
from sorl_trl.files import raise_if_disk_full, write_whole
from sorl_trl.records import RECIPE_FILE, checkpoints, policy_in
from sorl_trl.records.trained import SHARDS
from sorl_trl.rollout.engines.vllm import EngineUnavailable
from sorl_trl.rollout.tasks import FOR_QUESTIONS, unread
from sorl_trl.search import MalformedResponse
from sorl_trl.text import without_user
from sorl_trl.trainers import SOPPOTrainer
from sorl_trl.trainers.base import TurnLevelTrainer
from sorl_trl.trainers.checkpoint import RESTORED, newest_whole, resume_point

SECRET = "_token"
"""The ending of names of secret arguments, as in transformers."""
START_OPTIONS = ("dry_run", "resume_from_checkpoint")
"""Arguments that control how a run starts, not what it trains."""
PATHS = (
    *("model_name_or_path", "critic_model_name_or_path"),
    *("train_questions", "eval_questions", "corpus", "index"),
)
"""Arguments that may be paths. They are saved as absolute paths, so that they are valid from any folder."""


def run(words: Sequence[str]) -> None:
    """Train with a recipe and a command line, or rehearse it. All processes call it together."""
    with mistakes():
        arguments = parse_arguments(words)
        check_output_folder(arguments.config)
        if arguments.trainer.dry_run:
            try_out(arguments)
            return
        trainer = build_trainer(arguments)
    show(run_table(arguments, trainer), trainer)
    write_recipe(arguments, trainer)
    with interruptible(trainer):
        try:
            trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
        except EngineUnavailable as error:
            raise UserMistake(str(error)) from error
        except MalformedResponse as error:
            raise ConnectionError(str(error)) from error  # each process reports it, because others may not have met it
    write_recipe(arguments, trainer)  # by now a resumed run has its checkpoint's values
    _save(trainer)
    trainer.end()


def _save(trainer: TurnLevelTrainer) -> None:
    """Save the policy. Raises UserMistake if the guard found that it is not finite."""
    folder = str(trainer.args.output_dir)
    if any(isinstance(each, CollapseGuard) and each.is_broken for each in trainer.callback_handler.callbacks):
        raise UserMistake(f"no policy was saved, because training reached NaN: {folder} has earlier checkpoints")
    with raise_if_disk_full(Path(folder)):
        trainer.save_model(folder)
    trainer.save_state()
    trainer.accelerator.print(f"The policy is in {folder}, as a plain Hugging Face checkpoint.")
    if isinstance(trainer, SOPPOTrainer):
        trainer.accelerator.print(f"Its critic is in {folder}/critic: `sorl_trl.load_critic({folder!r})` loads it.")


def check_output_folder(config: TrainingArguments) -> None:
    """Find the checkpoint to resume from, and refuse a folder that another run has used: runs never share a folder.

    A run that saved nothing has not used its folder.

    Raises:
        ValueError: The checkpoint cannot be resumed from, or the output folder is in use.
    """
    folder, most = Path(str(config.output_dir)), config.max_steps
    resumed = config.resume_from_checkpoint = resume_point(config, config.resume_from_checkpoint)
    step = Path(resumed or "").name.rpartition("-")[2]
    if step.isdecimal() and 0 < most <= int(step):
        raise ValueError(f"{resumed} is at step {step}, but `max_steps` is {most}: raise it to continue")
    goes_on = resumed is not None and Path(resumed).resolve().parent == folder.resolve()
    if not goes_on and any((*checkpoints(folder), *folder.glob(SHARDS), policy_in(folder))):
        go_on = "continue it with `--resume_from_checkpoint latest`, " if checkpoints(folder) else ""
        raise ValueError(f"`output_dir` is {folder}, which contains a run: {go_on}remove it, or choose another folder")


@contextmanager
def interruptible(trainer: TurnLevelTrainer) -> Iterator[None]:
    """Context in which Ctrl-C ends training with one line and exit code 130; a second Ctrl-C ends it at once.

    A signal can interrupt training anywhere, and failures on the way out would cause many tracebacks, also in other
    processes.
    """
    interrupted = False

    def interrupt(*_: Any) -> None:
        nonlocal interrupted
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second signal must not cut the line off
        interrupted = True
        if trainer.is_world_process_zero():
            # Not with `print`, which the signal may have interrupted. The progress bar has left its line open.
            os.write(sys.stderr.fileno(), f"\n{_how_to_go_on(trainer)}\n".encode())
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if interrupted:
            atexit._run_exitfuncs()  # finishes trackers; the rest of an orderly exit would wait for all threads
            os._exit(INTERRUPTED)
        signal.signal(signal.SIGINT, before)


def _how_to_go_on(trainer: TurnLevelTrainer) -> str:
    at = f"interrupted at step {trainer.state.global_step}"
    if newest_whole(Path(str(trainer.args.output_dir))) is None:
        return f"{at}, before a checkpoint was saved"
    return f"{at}: continue with the same command and `--resume_from_checkpoint latest`"


def write_recipe(arguments: Arguments, trainer: TurnLevelTrainer) -> None:
    """Write `recipe.yaml` into a run's folder, created if missing, so that the run can be evaluated and repeated."""
    if not trainer.is_world_process_zero():
        return
    folder = Path(str(arguments.config.output_dir))
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(recipe_of(arguments), sort_keys=False, allow_unicode=True)
    head = f"# The recipe that trained the policy in this folder, with sorl-trl {package_version()}.\n"
    write_whole(folder / RECIPE_FILE, (head + text).encode("utf-8"))


def recipe_of(arguments: Arguments) -> dict[str, Any]:
    """The values set by recipe and command line, and all arguments of the agent, because defaults may change.

    If a resumed run takes a value from its checkpoint, that value is saved.
    """
    config = arguments.config
    agent = {name: value for name, value in asdict(arguments.rollout).items() if value is not None}
    without = () if arguments.rollout.searches else FOR_QUESTIONS
    for name in {*unread(arguments.rollout), *without} & {*agent}:
        del agent[name]
    values = {**agent, **arguments.given, "trainer": arguments.trainer.trainer}
    values |= {name: getattr(config, name) for name in ("max_completion_length", *RESTORED) if hasattr(config, name)}
    kept = [name for name in values if not name.endswith(SECRET) and name not in START_OPTIONS]
    return {name: _storable(name, values[name]) for name in kept}


def _storable(name: str, value: Any) -> Any:
    """A value without user and password in its URL."""
    if not isinstance(value, str):
        return value
    return str(Path(value).resolve()) if name in PATHS and Path(value).exists() else without_user(value)
