"""How a command answers a mistake of its user: one line on stderr that says what to do, and exit code 2.

Whose mistake an error is depends on when it is raised. While arguments are read and what they name is built
(`mistakes`), every ValueError is about the arguments. After that only errors of the world are (an OSError, a full
disk), and what is raised as `UserMistake`. All else is a programming error and keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from sorl_trl.text import one_line

EXIT_CODE = 2
DEBUG = "--debug"
DEBUG_HELP = "show the traceback of an error"
DEBUG_EPILOG = f"{DEBUG} without a value shows the traceback of an error."
DEBUG_VALUES = ("underflow_overflow", "tpu_metrics_debug")
"""With one of these, `--debug` is transformers' option of that name."""
HELP_HINT = "(--help lists the arguments)"

DISK_IS_FULL = "the disk is full: make room, or write elsewhere"
NO_PERMISSION = "no permission: change it, or name another place"
ADVICE = {
    errno.ENOSPC: DISK_IS_FULL,
    errno.EDQUOT: DISK_IS_FULL,
    errno.EFBIG: "the file grew larger than the system allows: raise the limit, or write elsewhere",
    errno.EACCES: NO_PERMISSION,
    errno.EPERM: NO_PERMISSION,
    errno.EROFS: "the disk cannot be written to: name another place",
    errno.ENOENT: "there is no such file or folder: check the name",
    errno.EEXIST: "there is a file of this name: name another place",
    errno.EISDIR: "this is a folder: name a file",
    errno.ENOTDIR: "a part of this path is a file: name a folder",
    errno.EADDRINUSE: "the port is taken: choose another one",
}
HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
FULL_DISK = ("disk is full", "basic_ios::clear", ". unexpected pos ")
"""How SQLite and torch say it, which raise no OSError."""
_called: ContextVar[str | None] = ContextVar("called", default=None)


class UserMistake(ValueError):
    """What the user of a command can put right. The message says how."""


def run_command(
    main: Callable[[Sequence[str]], int | None], words: Sequence[str] | None = None, called: str | None = None
) -> int:
    """Run a command, and return its exit code.

    A mistake of the user is one line on stderr, after its traceback if there is `--debug`. Under a launcher, one that
    all processes make alike is said once per machine.

    Args:
        main: The command.
        words: Its command line, by default that of this process.
        called: The name under which the user knows it, such as "sorl index", if it is not the one that it has itself.
    """
    words, debug = _without_debug(sys.argv[1:] if words is None else words)
    outer = _called.set(called)
    try:
        return main(words) or 0
    except Exception as error:
        worldly = error if isinstance(error, UserMistake) else _of_the_world(error)
        if worldly is None:
            raise
        if debug:
            traceback.print_exception(error)
        if debug or not isinstance(error, UserMistake) or os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {explain(worldly)}", file=sys.stderr)
        return EXIT_CODE
    finally:
        _called.reset(outer)


def command_name(otherwise: str) -> str:
    """The name under which the user called the command that runs, `otherwise` its own."""
    return _called.get() or otherwise


def _without_debug(words: Sequence[str]) -> tuple[list[str], bool]:
    kept = [word for i, word in enumerate(words) if word != DEBUG or [*words, ""][i + 1] in DEBUG_VALUES]
    return kept, len(kept) < len(words)


@contextmanager
def mistakes(about: str = "") -> Iterator[None]:
    """Around what reads arguments or builds what they name: errors become `UserMistake`, with `about` before them."""
    import yaml

    try:
        yield
    except UserMistake:
        raise
    except (OSError, ValueError, OverflowError, ImportError, yaml.YAMLError) as error:
        raise UserMistake(f"{about}: {explain(error)}" if about else explain(error)) from error


@contextmanager
def reading(advice: str = "") -> Iterator[None]:
    """As `mistakes`, where dataclasses compare what a YAML file gave them; `advice` follows what this says."""
    try:
        with mistakes():
            yield
    except (TypeError, AttributeError) as error:
        raise UserMistake(f"a value is of the wrong kind: {one_line(error)}{advice}") from error


def check_checkpoint(name: str) -> None:
    """Raises `UserMistake` for a path that is not there: the Hub's rules for ids, cited otherwise, are no help."""
    if not Path(name).exists() and not HUB_ID.fullmatch(name):
        made = "; `sorl quickstart` makes it, in this folder" if name.startswith("runs/quickstart/") else ""
        raise UserMistake(
            f"`model_name_or_path` is {name!r}, but there is no such folder, nor can it be a Hub id{made}"
        )


def explain(error: BaseException) -> str:
    """What an error says, in one line; of an error of the system, which file it is about and what to do."""
    number = _number(error)
    if number is None or isinstance(error, UserMistake):
        return one_line(error)
    if isinstance(error, OSError):
        return f"{error.filename}: {ADVICE[number]}" if error.filename is not None else ADVICE[number]
    return f"{ADVICE[number]} ({one_line(error)})"


def _of_the_world(error: BaseException) -> BaseException | None:
    """The error if it is one of the system, or the full disk that led to it."""
    if isinstance(error, OSError) or _number(error) is not None:
        return error
    led: BaseException | None = error
    while led is not None and ADVICE.get(_number(led) or 0) != DISK_IS_FULL:
        led = led.__cause__ or led.__context__
    return led


def _number(error: BaseException) -> int | None:
    """The system's number of an error for which there is advice, also where a library that is no Python says it."""
    if isinstance(error, OSError):
        return error.errno if error.errno in ADVICE and error.strerror else None
    if any(text in str(error) for text in FULL_DISK):
        return errno.ENOSPC
    said = re.search(r"\(os error (\d+)\)", str(error))
    return int(said[1]) if said and int(said[1]) in ADVICE else None


def refuse(parser: ArgumentParser, message: str) -> NoReturn:
    """In the place of a parser's `error`, which prints the usage."""
    raise UserMistake(f"{message} {HELP_HINT}")


class Parser(ArgumentParser):
    """An `ArgumentParser` for `run_command`: it raises `UserMistake`, and its help names `--debug`."""

    error = refuse

    def __init__(self, prog: str | None = None, **settings: Any) -> None:
        super().__init__(_called.get() or prog, **{"allow_abbrev": False, **settings})
        self.add_argument(DEBUG, action="store_true", default=SUPPRESS, help=DEBUG_HELP)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """An option that is not known is named before one that is missing."""
        words = sys.argv[1:] if args is None else list(args)
        check_options(self, words, self.prog)
        return super().parse_args(words, namespace)


def at_least(least: int) -> Callable[[str], int]:
    """The `type` of an argument that is a whole number from `least` on."""

    def whole_number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
        return int(text)

    return whole_number


def separate_config(words: Sequence[str]) -> list[str]:
    """A command line with `--config FILE` in two words, as TRL wants it.

    Raises:
        UserMistake: No file follows.
    """
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    if words[-1:] == ["--config"]:
        raise UserMistake("`--config` is the last word, but must be followed by a YAML file")
    return words


def parse_groups(
    parser: Any, words: Sequence[str], command: str, elsewhere: Mapping[str, str] | None = None, advice: str = ""
) -> tuple[Any, ...]:
    """The dataclasses of a `TrlParser` whose `error` is `refuse`, from a command line and its `--config`.

    Args:
        parser: The parser.
        words: As `separate_config` gives them.
        command: Whose arguments they are.
        elsewhere: Arguments that the parser does not know -> where they belong.
        advice: What to do about a value of the wrong kind.

    Raises:
        UserMistake: An argument is unknown, of the command line or of the file, or its value is refused.
    """
    check_options(parser, words, command, elsewhere)
    with reading(advice):
        *groups, in_file, strays = parser.parse_args_and_config(
            words, return_remaining_strings=True, separate_remaining_strings=True
        )
    if in_file:
        file = words[words.index("--config") + 1]
        raise _unknown(f"`{in_file[0][2:]}` in {file}", in_file[0], parser, command, elsewhere)
    if strays:
        raise UserMistake(f"{strays[0]!r} belongs to no argument of {command} {HELP_HINT}")
    return tuple(groups)


def check_options(
    parser: ArgumentParser, words: Sequence[str], command: str, elsewhere: Mapping[str, str] | None = None
) -> None:
    """Raises `UserMistake` for an option that is not the parser's, with the one that was meant perhaps."""
    known = {"--config", *parser._option_string_actions}
    for option in (word.partition("=")[0] for word in words if word.startswith("--") and word != "--"):
        short = parser.allow_abbrev and any(name.startswith(option) for name in known)
        if option not in known and not short:
            raise _unknown(f"`{option}`", option, parser, command, elsewhere)


def _unknown(
    shown: str, option: str, parser: ArgumentParser, command: str, elsewhere: Mapping[str, str] | None
) -> UserMistake:
    name = option.lstrip("-").replace("-", "_")
    if elsewhere and name in elsewhere:
        return UserMistake(f"{shown} is an argument of {elsewhere[name]} alone {HELP_HINT}")
    close = get_close_matches(option, parser._option_string_actions, n=1, cutoff=0.7)
    meant = f"; is it `{close[0] if option in shown else close[0][2:]}`?" if close else ""
    return UserMistake(f"{shown} is no argument of {command}{meant} {HELP_HINT}")
