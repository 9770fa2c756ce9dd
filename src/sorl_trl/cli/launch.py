"""`sorl train`: passes `sorl_trl.cli.train` to `accelerate launch`, with the arguments that belong to each."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice

import psutil

from sorl_trl.command_line import INTERRUPTED, mistakes, read_config, refuse
from sorl_trl.recipe.first_look import look_over
from sorl_trl.shipped import CONFIGS

MODULE = "sorl_trl.cli.train"
SHARED = frozenset({"-h", "--help", "--debug", "--gradient_accumulation_steps", "--gradient-accumulation-steps"})
"""Options that both know. They belong to training. A test compares this with the two parsers."""
HELP = """\
`sorl train` starts training through `accelerate launch`, on as many processes and machines as its config says.

  --accelerate_config NAME_OR_PATH
                        a YAML file of accelerate, or one of ours by its name (`sorl configs` lists them); by
                        default the one that `accelerate config` wrote
  --config NAME_OR_PATH
                        the recipe: a YAML file, or one of ours by its name (`sorl recipes` lists them)

Arguments of `accelerate launch`, such as --num_processes 2 or --machine_rank 1, go to the launcher; those below go
to training, and may stand in the recipe as well.
"""


def main(words: Sequence[str]) -> int:
    """Train, and return the exit code."""
    with mistakes():
        asks_for_help = not {"-h", "--help"}.isdisjoint(words)
        if not asks_for_help:
            look_over(words)
        parser = _parser()
        for_launch, for_training = split(words, parser)
        if asks_for_help:
            from sorl_trl.cli.train import main as train

            print(HELP)
            return train(for_training)
        return _launch(read_launch_arguments(for_launch, for_training, parser))


def _parser() -> ArgumentParser:
    """Accelerate's parser, with our argument."""
    from accelerate.commands.launch import launch_command_parser

    parser: ArgumentParser = launch_command_parser()
    parser.add_argument("--accelerate_config")
    parser.error = refuse  # type: ignore[method-assign]
    return parser


def split(words: Sequence[str], parser: ArgumentParser) -> tuple[list[str], list[str]]:
    """Split words into accelerate's and training's. Training's are those that accelerate lacks or both have."""
    for_launch: list[str] = []
    for_training: list[str] = []
    left = iter(words)
    for word in left:
        option, given, _ = word.partition("=")
        action = None if option in SHARED else parser._option_string_actions.get(option)
        if action is None:
            for_training.append(word)
        else:
            takes_next = action.nargs is None and not given
            for_launch += [word, *islice(left, 1)] if takes_next else [word]
    return for_launch, for_training


def read_launch_arguments(launch: Sequence[str], training: Sequence[str], parser: ArgumentParser) -> Namespace:
    """Read the launcher's arguments. Raises UserMistake if a value is refused or a config does not exist."""
    arguments = parser.parse_args([*launch, "--module", MODULE, *training])
    if arguments.accelerate_config is not None:
        config = CONFIGS.find(arguments.accelerate_config)
        read_config(config, ())  # without a mapping, accelerate would fail with a traceback
        arguments.config_file = str(config)
    return arguments


def _launch(arguments: Namespace) -> int:
    """Launch, and return the exit code. Training has said what went wrong, so no traceback of the launcher follows."""
    from accelerate.utils import patch_environment

    arguments.quiet = False  # `quiet` would turn every exit code into 1
    # A terminal also sends Ctrl-C to a single training process. With several, torch's own handlers pass it on.
    handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: _pass_on}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        # Otherwise `python -m` would import modules of the current folder.
        with patch_environment(PYTHONSAFEPATH="1", **_said_to_deepspeed()):
            code = _exit_code(arguments)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code in (INTERRUPTED, -signal.SIGINT):
        return INTERRUPTED
    if code < 0:
        print(f"error: training was ended by {signal.Signals(-code).name}", file=sys.stderr)
    return code if code >= 0 else 1


def _pass_on(number: int, _: object) -> None:
    """Pass a signal on to training, which would outlive this process and go on writing into its folder."""
    processes = psutil.Process().children(recursive=True)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    if not processes:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _said_to_deepspeed() -> dict[str, str]:
    """The variable that keeps DeepSpeed, if installed, from printing on stdout that there is no GPU."""
    from torch import accelerator

    return {} if accelerator.is_available() else {"DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu")}


def _exit_code(arguments: Namespace) -> int:
    """Run training, and return its exit code, or the negative number of the signal that ended it."""
    from accelerate.commands import launch as launcher
    from torch.distributed.elastic.agent.server import api as agent
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing import api as workers
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for module in (launcher, agent, workers):  # they log their defaults and each process that they end
        logging.getLogger(module.__name__).setLevel(logging.ERROR)
    try:
        launcher.launch_command(arguments)
    except subprocess.CalledProcessError as error:
        return int(error.returncode)
    except ChildFailedError as error:
        return int(error.get_first_failure()[1].exitcode)
    except SignalException as error:  # several processes, or a second signal while it waits for them to end
        for process in psutil.Process().children(recursive=True):
            process.kill()
        return -int(error.sigval)
    return 0
