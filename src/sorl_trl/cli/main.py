"""The console command `sorl`: its subcommands, and how one is run. What is heavy is imported by the command alone."""

from __future__ import annotations

import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from typing import cast

from sorl_trl.cli.shipped import with_recipe
from sorl_trl.command_line import DEBUG, Parser, UserMistake, run_command

Main = Callable[[Sequence[str]], int | None]


@dataclass(frozen=True)
class Command:
    """A subcommand."""

    main: str
    """`module:function`, imported when the command is run."""
    help: str
    takes_recipe: bool = False
    """Its `--config` may be the name of one of our recipes."""
    keeps_debug: bool = False
    """It is given `--debug` too, for the processes that it starts."""

    def run(self, name: str, words: Sequence[str]) -> int:
        """Run it; returns the exit code."""

        def run(without_debug: Sequence[str]) -> int | None:
            own = words if self.keeps_debug else without_debug
            own = with_recipe(own) if self.takes_recipe else own
            module, _, function = self.main.partition(":")
            return cast(Main, getattr(import_module(module), function))(own)

        return run_command(run, words, f"sorl {name}")


COMMANDS = {
    "quickstart": Command("sorl_trl.cli.quickstart:main", "train a tiny agent, offline, in minutes"),
    "recipes": Command("sorl_trl.cli.shipped:recipes", "list the recipes, or copy one out"),
    "configs": Command("sorl_trl.cli.shipped:configs", "list the configs for accelerate, or copy one out"),
    "doctor": Command("sorl_trl.doctor.__main__:main", "say what is wrong with a recipe", True),
    "train": Command(
        "sorl_trl.cli.launch:main", "train an agent, through `accelerate launch`", True, keeps_debug=True
    ),
    "report": Command("sorl_trl.diagnostics.report:main", "curves and figures of training runs"),
    "evaluate": Command("sorl_trl.cli.evaluate:main", "ask a checkpoint questions, and score it"),
    "compare": Command("sorl_trl.cli.compare:main", "compare two evaluations, question by question"),
    "view": Command("sorl_trl.viewer.command:main", "a page to read trajectories in"),
    "index": Command("sorl_trl.search.index:main", "build a search index of a corpus"),
    "serve": Command("sorl_trl.search.serve:main", "serve a search index over HTTP"),
}
"""In the order in which the help lists them: that of a first day."""


def main(words: Sequence[str] | None = None) -> int:
    """Run `sorl` with `words`, by default those of the command line; returns the exit code."""
    words = list(sys.argv[1:] if words is None else words)
    if words[:1] == [DEBUG]:
        words = [*words[1:], DEBUG]
    if words and words[0] in COMMANDS:
        return COMMANDS[words[0]].run(words[0], words[1:])
    return run_command(_without_command, words)


def _without_command(words: Sequence[str]) -> None:
    """Help, the version, or a mistake."""
    if words and not words[0].startswith("-"):
        close = get_close_matches(words[0], COMMANDS, n=1)
        meant = f"; is it `{close[0]}`?" if close else ""
        raise UserMistake(f"{words[0]!r} is no command of sorl{meant} (--help lists the commands)")
    parser = _parser()
    parser.parse_args(words)
    parser.print_help()


def _parser() -> Parser:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items())
    parser = Parser(
        prog="sorl",
        usage="sorl COMMAND [ARGUMENTS]",
        description=f"Turn-level GRPO and PPO for agents that work turn by turn.\n\ncommands:\n{commands}",
        epilog="`sorl COMMAND --help` lists the arguments of a command.",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sorl-trl {version('sorl-trl')}")
    return parser
