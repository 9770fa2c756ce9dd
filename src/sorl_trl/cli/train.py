"""`sorl train` launches training through accelerate. `main` is the training itself, in `train.py` and each process.

Nothing slow is imported before a function needs it, so that an early Ctrl-C shows no traceback.
"""

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

from sorl_trl.command_line import (
    CONFIGS,
    INTERRUPTED,
    RECIPES,
    mistakes,
    read_config,
    read_mapping,
    refuse,
    run_command,
    take_options,
)

MODULE = "sorl_trl.cli.train"
SHARED = frozenset({"-h", "--help", "--debug", "--gradient_accumulation_steps", "--gradient-accumulation-steps"})
"""Options of training that `accelerate launch` also has. `sorl train` passes them to training."""
HELP = """\
usage: sorl train [--accelerate_config NAME_OR_PATH] [--config NAME_OR_PATH] [--OPTION VALUE ...]

Trains an agent through `accelerate launch`. Options of `accelerate launch`, such as --num_processes 2, go to the
launcher; a recipe may set all others, and the command line overrides it.

  --accelerate_config NAME_OR_PATH
                        an accelerate YAML file, or the name of a shipped one (`sorl configs` lists them); by default
                        the file that `accelerate config` wrote
  --config NAME_OR_PATH
                        the recipe: a YAML file, or the name of a shipped one (`sorl recipes` lists them)
  --dry_run             builds everything, asks the policy two questions, prints what a step would do, and exits

the ten most important options:
  --model_name_or_path  the policy: a folder or a Hub id
  --train_questions     a JSONL file of questions
  --output_dir          the folder of the run
  --max_steps           optimizer steps
  --learning_rate       of the policy
  --num_generations     trajectories per question
  --per_device_train_batch_size
                        trajectories per device in one forward pass
  --steps_per_generation
                        the number of these batches per rollout; with --gradient_accumulation_steps, an update takes
                        several of them
  --num_iterations      passes over a rollout
  --max_completion_length
                        the most tokens of a trajectory's turns and observations

`sorl train --help all` lists every option; add `--trainer so_ppo` for that trainer's options.
"""


def main(words: Sequence[str]) -> int:
    """Train in this process, possibly started by `accelerate launch`, and return the exit code."""
    if _asks_for_help(words) and "all" not in words:
        print(HELP, end="")
        return 0
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # `rollout_func` is experimental, so TRL is pinned
    from sorl_trl.cli.run import run
    from sorl_trl.diagnostics.callbacks import whole_lines

    with whole_lines():
        run(words)
    return 0


def launch(words: Sequence[str]) -> int:
    """`sorl train`: start `main` through `accelerate launch`, wait for its end, and return its exit code."""
    if _asks_for_help(words):
        return main(words)
    (recipe,), _ = take_options(words, "config")
    if recipe is not None:
        read_mapping(RECIPES.find(recipe))  # before the processes start, which takes a while
    with mistakes():
        return _exit_code(launch_arguments(words))


def _asks_for_help(words: Sequence[str]) -> bool:
    return not {"-h", "--help"}.isdisjoint(words)


def launch_arguments(words: Sequence[str]) -> Namespace:
    """The arguments of `accelerate launch`, including training's words. Raises UserMistake if a value is invalid."""
    from accelerate.commands.launch import launch_command_parser

    parser: ArgumentParser = launch_command_parser()
    parser.add_argument("--accelerate_config")
    parser.error = refuse  # type: ignore[method-assign]
    for_launch, for_training = _split(words, parser)
    arguments = parser.parse_args([*for_launch, "--module", MODULE, *for_training])
    arguments.quiet = False  # it would turn every exit code into 1
    if arguments.accelerate_config is not None:
        config = CONFIGS.find(arguments.accelerate_config)
        read_config(config, ())  # without a mapping, accelerate would fail with a traceback
        arguments.config_file = str(config)
    return arguments


def _split(words: Sequence[str], parser: ArgumentParser) -> tuple[list[str], list[str]]:
    """Split words into the launcher's and training's. Training's are those that accelerate lacks or both have."""
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


def _exit_code(arguments: Namespace) -> int:
    """Launch, and return the exit code of training, which reports its own errors."""
    from accelerate.commands import launch as launcher
    from accelerate.utils import patch_environment
    from torch import accelerator
    from torch.distributed.elastic.agent.server import api as agent
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing import api as workers
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for module in (launcher, agent, workers):  # they log their defaults, and each process that ends
        logging.getLogger(module.__name__).setLevel(logging.CRITICAL)
    # Ctrl-C ends training, which reports it: a terminal sends it to all processes, and torch's launcher passes it on.
    handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: _end}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    code = 0
    try:
        # Otherwise DeepSpeed would print that there is no GPU, and `python -m` import modules of this folder.
        device = {} if accelerator.is_available() else {"DS_ACCELERATOR": "cpu"}
        with patch_environment(PYTHONSAFEPATH="1", **device):
            launcher.launch_command(arguments)
    except subprocess.CalledProcessError as error:
        code = error.returncode
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
    except SignalException as error:
        code = -error.sigval
        _end_training()  # after a second signal, some may be left
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code == -signal.SIGINT:
        return INTERRUPTED
    if code < 0:
        sys.exit(f"error: training was terminated by {signal.Signals(-code).name}")
    return code


def _end(number: int, _: object) -> None:
    """End training too: it would outlive this process and continue to write into its folder."""
    _end_training()
    sys.exit(f"error: training was terminated by {signal.Signals(number).name}")


def _end_training() -> None:
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.terminate()


if __name__ == "__main__":
    sys.exit(run_command(main))
