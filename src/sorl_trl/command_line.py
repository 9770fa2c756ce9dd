"""Reads a command's arguments, and reports mistakes in them with one line on stderr and exit code 2.

The phase in which an error is raised determines its kind. While arguments are read and the objects that they name are
built (`mistakes`), every ValueError is about the arguments. After that, only an OSError (such as a full disk) and
`UserMistake` are user errors. Any other error is a programming error and keeps its traceback. With SORL_DEBUG=1 in the
environment, which launched processes inherit, mistakes also show their tracebacks.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import socket
import sys
import traceback
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

import yaml

from sorl_trl.checks import did_you_mean
from sorl_trl.files import missing
from sorl_trl.text import one_line

INTERRUPTED = 130
"""The exit code after Ctrl-C, as in a shell."""
LAST_PORT = 65535
PENDING_CONNECTIONS = 2048
"""How many connections the operating system keeps until a server takes them; our choice."""
HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
PACKAGE = Path(__file__).parent
NAMED_BY_TEXT = ("corpus", "eval_questions", "index", "model_name_or_path", "output", "output_dir", "train_questions")
"""Arguments that must be a path or a name, checked before a library raises a less clear error."""


class UserMistake(ValueError):
    """A mistake that the user of a command can correct. The message explains how."""


def run_command(main: Callable[[Sequence[str]], int | None], words: Sequence[str] | None = None) -> int:
    """Run a command with `words`, by default those of this process, and return its exit code.

    If all launched processes make the same mistake, it is reported once per machine.
    """
    try:
        return main(sys.argv[1:] if words is None else words) or 0
    except (UserMistake, OSError) as error:
        if is_first_process() or not isinstance(error, UserMistake):
            if os.environ.get("SORL_DEBUG"):
                traceback.print_exception(error)
            print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if is_first_process():
            print("interrupted", file=sys.stderr)
        return INTERRUPTED


@contextmanager
def mistakes(about: str = "") -> Iterator[None]:
    """Turn errors while reading arguments or building what they name into `UserMistake`, with `about` first."""
    try:
        yield
    except UserMistake:
        raise
    except (OSError, ValueError, OverflowError, ImportError, yaml.YAMLError) as error:
        raise UserMistake(f"{about}: {one_line(error)}" if about else one_line(error)) from error


def refuse(message: str) -> NoReturn:
    """Raise a `UserMistake`, instead of a parser's `error`, which prints the usage and ends the process."""
    raise UserMistake(f"{message} (--help lists the arguments)")


def is_first_process() -> bool:
    """Whether this process reports for its machine: the launcher's local rank 0, or the only one."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def check_checkpoint(name: str, argument: str = "model_name_or_path") -> None:
    """Raise `UserMistake` for a path that does not exist. The library's own error explains only Hub ids."""
    if not Path(name).exists() and not HUB_ID.fullmatch(name):
        raise UserMistake(missing(argument, name, "folder, nor can it be a Hub id"))


class Parser(ArgumentParser):
    """An `ArgumentParser` for `run_command`. It raises `UserMistake`, and shows its description as written."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": RawDescriptionHelpFormatter, **settings})

    def error(self, message: str) -> NoReturn:
        refuse(message)

    def parse_args(self, words: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        check_options(sys.argv[1:] if words is None else words, self._option_string_actions)
        return super().parse_args(words, namespace)

    def add_address(self) -> None:
        """Add `--host` and `--port`, for `listen`."""
        self.add_argument(
            "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: %(default)s)"
        )
        self.add_argument(
            "--port", type=port, default=8000, metavar="N", help="0 chooses a free one (default: %(default)s)"
        )


def sorl_command(*words: str) -> str:
    """The command `sorl` with these words, to be pasted into a shell."""
    return shlex.join(["sorl", *words])


def at_least(least: int) -> Callable[[str], int]:
    """Make the `type` of an argument that is a whole number of at least `least`."""

    def whole_number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
        return int(text)

    return whole_number


def port(text: str) -> int:
    """The `type` of an argument that is the port of a server; 0 chooses a free one."""
    if not text.isdecimal() or int(text) > LAST_PORT:
        raise ArgumentTypeError(f"must be a whole number from 0 to {LAST_PORT}, got {text!r}")
    return int(text)


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket that listens at an address; port 0 is a free one. Raises UserMistake, naming `--port` or `host`."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=PENDING_CONNECTIONS)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserMistake(f"`--port` is {port}, which is in use: choose another, or 0 for a free one") from error
        found = f"`--port` is {port}" if error.errno == errno.EACCES else f"`host` is {host!r}"
        raise UserMistake(f"{found}, where this process cannot listen: {one_line(error)}") from error


def options_in(words: Sequence[str]) -> set[str]:
    """The names of the options on a command line, as in recipes."""
    return {word.lstrip("-").partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}


def check_options(words: Sequence[str], known: Iterable[str]) -> None:
    """Raise `UserMistake` for an option that is not `known`, before anything else is said about the command line."""
    names = {each.lstrip("-").replace("-", "_") for each in known}
    for name in sorted(filter(str.isidentifier, options_in(words) - names)):
        refuse(f"unrecognized arguments: --{name}{did_you_mean(f'--{name}', [f'--{each}' for each in names])}")


def parse_dataclasses(
    classes: Sequence[type], words: Sequence[str], defaults: Mapping[str, Any], usage: str, about: str = ""
) -> tuple[list[Any], dict[str, Any]]:
    """Make dataclasses from a command line, as `TrlParser` does, with a recipe's values as `defaults`.

    `--help` prints the `usage` and all their options, with `about` first.

    Returns:
        The dataclasses, and the values that the command line sets, by name.

    Raises:
        UserMistake: An argument is unknown, or its value is invalid.
    """
    from trl import TrlParser

    parser = TrlParser(classes, usage=usage, description=about, allow_abbrev=False)
    parser.error = refuse
    check_options([*words, *(f"--{name}" for name in defaults)], parser._option_string_actions)
    unknown = parser.set_defaults_with_config(**defaults)
    try:
        with mistakes():
            *groups, strays = parser.parse_args_into_dataclasses([*words], return_remaining_strings=True)
    except (TypeError, AttributeError) as error:  # dataclasses use a YAML file's values unchecked
        raise UserMistake(f"a value has the wrong type: {one_line(error)}") from error
    if unknown or strays:
        refuse(f"unrecognized arguments: {' '.join([*unknown, *strays])}")
    options = options_in(words)
    parsed = vars(parser.parse_known_args([*words])[0])
    return groups, {name: parsed[name] for name in parsed if not options.isdisjoint((name, f"no_{name}"))}


def take_options(words: Sequence[str], *names: str, **defaults: Any) -> tuple[list[Any], list[str]]:
    """Split a command line into the values of the named options, None without a default, and the other words."""
    parser = Parser(add_help=False)
    for name in names:
        parser.add_argument(f"--{name}", default=defaults.get(name))
    known, others = parser.parse_known_args(words)
    return [getattr(known, name) for name in names], others


def read_config(path: Path, words: Sequence[str], alternatives: Sequence[str] = ()) -> dict[str, Any]:
    """Read the arguments in a YAML file, and put its `env` into the environment, as TRL's scripts do.

    Only one of the `alternatives` may be set: if the command line `words` has one, the file's are dropped.

    Raises:
        UserMistake: The file cannot be read, is not a mapping, or has another type of value where text is needed.
    """
    config = read_mapping(path)
    env = config.pop("env", None) or {}
    if not isinstance(env, dict):
        raise UserMistake(f"{path}: `env` is {env!r}, but must be a mapping of variables to values")
    os.environ.update({name: str(value) for name, value in env.items()})
    for name in NAMED_BY_TEXT:
        if not isinstance(config.get(name, ""), str | None):
            raise UserMistake(f"{path}: `{name}` is {config[name]!r}, but must be text")
    left_out = set() if options_in(words).isdisjoint(alternatives) else set(alternatives)
    return {name: value for name, value in config.items() if name not in left_out}


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML file of arguments. Raises UserMistake if it cannot be read, or is not a mapping of names."""
    with mistakes(str(path)):
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict) or not all(isinstance(name, str) for name in config):
        raise UserMistake(f"{path} must contain a YAML mapping of arguments")
    return config


@dataclass(frozen=True)
class Shipped:
    """A folder of YAML files in the package. An argument takes the name of one or the path of a user's own file."""

    folder: str
    """The folder in the package. It has the same name at the root of the repository."""
    command: str
    """The subcommand of `sorl` that lists them."""
    option: str
    """The argument of `sorl train` that takes a name or a path."""

    @property
    def paths(self) -> dict[str, Path]:
        """Name -> file, in alphabetical order."""
        return {path.stem: path for path in sorted((PACKAGE / self.folder).glob("*.yaml"))}

    def find(self, name: str, argument: str = "") -> Path:
        """Find the user's file with this path, or the shipped one with this name. `argument` names its origin.

        Raises:
            UserMistake: Neither exists.
        """
        if Path(name).is_file():
            return Path(name)
        if name in self.paths:
            return self.paths[name]
        problem = f"{argument or self.option}: {name!r} is neither a file nor listed by `sorl {self.command}`"
        raise UserMistake(f"{problem}{did_you_mean(name, self.paths)}")

    def listing(self) -> str:
        """One line per file: its name, and the first sentence of the comment at its top."""
        width = max(map(len, self.paths))
        lines = [f"{name:{width}}  {_first_sentence(path)}" for name, path in self.paths.items()]
        usage = f"`sorl train {self.option} NAME` uses one, `sorl {self.command} NAME > FILE` copies one."
        return "\n".join([*lines, "", usage])


RECIPES = Shipped("recipes", "recipes", "--config")
CONFIGS = Shipped("accelerate_configs", "configs", "--accelerate_config")


def _first_sentence(path: Path) -> str:
    comment = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    sentence, _, _ = " ".join(line.lstrip("# ") for line in comment).partition(". ")
    return sentence


def package_version() -> str:
    """The version of the installed package; "unknown" in a source tree that is not installed."""
    try:
        return version("sorl-trl")
    except PackageNotFoundError:
        return "unknown"
