"""One run of training: it is built, it trains, and it leaves its policy and its recipe in a folder of its own."""

from __future__ import annotations

import atexit
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainingArguments

from sorl_trl.agents.vllm import EngineUnavailable
from sorl_trl.cli.arguments import Arguments, parse_arguments
from sorl_trl.cli.build import build_trainer
from sorl_trl.cli.dry_run import run_table, show, try_out
from sorl_trl.command_line import INTERRUPTED, UserMistake, mistakes, package_version
from sorl_trl.diagnostics.callbacks import CollapseGuard
from sorl_trl.files import raise_if_disk_full, write_whole
from sorl_trl.records import RECIPE_FILE, checkpoints
from sorl_trl.records.resume_point import ADAPTERS, WEIGHTS, newest_whole, resume_point
from sorl_trl.records.trained import SHARDS
from sorl_trl.rollout.tasks import FOR_QUESTIONS, unread
from sorl_trl.search import MalformedResponse
from sorl_trl.text import without_user
from sorl_trl.trainers import SOPPOTrainer
from sorl_trl.trainers.base import TurnLevelTrainer
from sorl_trl.trainers.checkpoint import RESTORED

SIGNS = (*WEIGHTS, *ADAPTERS)
"""A folder with one of these files holds a policy."""
SECRET = "_token"
"""Arguments whose names end like this are secrets, as in transformers."""
START_OPTIONS = ("dry_run", "resume_from_checkpoint")
"""Arguments that say what to do with a run, not what it is."""
PATHS = (
    *("model_name_or_path", "critic_model_name_or_path"),
    *("train_questions", "eval_questions", "corpus", "index", "search_cache"),
)
"""Arguments that may be paths. They are written as absolute paths, so that they are valid from anywhere."""


def run(words: Sequence[str]) -> None:
    """Train as a recipe and a command line say, or rehearse it. All processes call it together."""
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
    """Save the policy, and say what to do with it. Raises UserMistake if the guard found that it is not finite."""
    folder = str(trainer.args.output_dir)
    if any(isinstance(each, CollapseGuard) and each.is_broken for each in trainer.callback_handler.callbacks):
        raise UserMistake(f"no policy is saved, for training met NaN: {folder} has the checkpoints before")
    with raise_if_disk_full(Path(folder)):
        trainer.save_model(folder)
    trainer.save_state()
    trainer.accelerator.print(f"The policy is in {folder}: a plain checkpoint, load it as any other.")
    if isinstance(trainer, SOPPOTrainer):
        trainer.accelerator.print(f"Its critic is in {folder}/critic: `sorl_trl.load_critic({folder!r})` loads it.")
    quoted = shlex.quote(folder)
    trainer.accelerator.print(f"Next: sorl evaluate {quoted}   sorl view {quoted}")


def check_output_folder(config: TrainingArguments) -> None:
    """Find the checkpoint to resume from, and refuse a folder that another run has used, because two never share one.

    A run that saved nothing has not used its folder.

    Raises:
        ValueError: The checkpoint cannot be resumed from, or the output folder is used.
    """
    folder, most = Path(str(config.output_dir)), config.max_steps
    resumed = config.resume_from_checkpoint = resume_point(config, config.resume_from_checkpoint)
    step = Path(resumed or "").name.rpartition("-")[2]
    if step.isdecimal() and 0 < most <= int(step):
        raise ValueError(f"{resumed} is at step {step}, and `max_steps` is {most}: raise it to go on")
    goes_on = resumed is not None and Path(resumed).resolve().parent == folder.resolve()
    is_used = any((*checkpoints(folder), *folder.glob(SHARDS), *filter(Path.is_file, map(folder.joinpath, SIGNS))))
    if is_used and not goes_on:
        go_on = "`--resume_from_checkpoint latest` goes on with it, or " if checkpoints(folder) else ""
        raise ValueError(f"`output_dir` is {folder}, which holds a run: {go_on}remove it, or name another folder")


@contextmanager
def interruptible(trainer: TurnLevelTrainer) -> Iterator[None]:
    """Within it, Ctrl-C ends training with one line and exit code 130; a second one ends it at once.

    A signal interrupts training anywhere, and what breaks on the way out would cause many tracebacks, also in other
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
    return f"{at}: the same command with `--resume_from_checkpoint latest` goes on"


def write_recipe(arguments: Arguments, trainer: TurnLevelTrainer) -> None:
    """Write `recipe.yaml` into the folder of a run, which is made if missing: it can be evaluated and repeated so."""
    if not trainer.is_world_process_zero():
        return
    folder = Path(str(arguments.config.output_dir))
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(recipe_of(arguments), sort_keys=False, allow_unicode=True)
    head = f"# What trained the policy in this folder, with sorl-trl {package_version()}.\n"
    write_whole(folder / RECIPE_FILE, (head + text).encode("utf-8"))


def recipe_of(arguments: Arguments) -> dict[str, Any]:
    """What recipe and command line set, and all that shapes the agent, because its defaults may change.

    If a resumed run takes a value from its checkpoint, that value is written.
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
    """A value without the user of a URL, who may have a password."""
    if not isinstance(value, str):
        return value
    return str(Path(value).resolve()) if name in PATHS and Path(value).exists() else without_user(value)
