"""The console command `sorl` and its subcommands. A command imports what it needs when it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module

from sorl_trl.checks import did_you_mean
from sorl_trl.command_line import CONFIGS, RECIPES, Parser, Shipped, UserMistake, package_version, run_command

COMMANDS = {
    "recipes": ("sorl_trl.cli.main:recipes", "list the recipes, or print one"),
    "configs": ("sorl_trl.cli.main:configs", "list the accelerate configs, or print one"),
    "train": ("sorl_trl.cli.train:launch", "train an agent through `accelerate launch`, or rehearse with --dry_run"),
    "evaluate": ("sorl_trl.cli.evaluate:main", "score a checkpoint on questions"),
    "serve-policy": (
        "sorl_trl.cli.serve_policy:main",
        "serve a checkpoint to agents, as OpenAI or Anthropic would",
    ),
    "compare": ("sorl_trl.cli.evaluate:compare", "compare two evaluations, question by question"),
    "view": ("sorl_trl.records.view:main", "write a page for reading trajectories"),
    "index": ("sorl_trl.search.commands:index", "build a search index of a corpus"),
    "serve": ("sorl_trl.search.commands:serve", "serve a search index over HTTP"),
}
"""Name -> `module:function`, imported when the command runs, and its help, in the order of first use."""


def main(words: Sequence[str] | None = None) -> int:
    """Run `sorl` with `words`, by default those of the command line, and return the exit code."""
    words = list(sys.argv[1:] if words is None else words)
    if not words or words[0] not in COMMANDS:
        return run_command(_without_command, words)
    module, _, function = COMMANDS[words[0]][0].partition(":")
    return run_command(lambda rest: getattr(import_module(module), function)(rest), words[1:])


def _without_command(words: Sequence[str]) -> None:
    """Print the help or the version, or raise a mistake."""
    if words and not words[0].startswith("-"):
        similar = did_you_mean(words[0], COMMANDS)
        raise UserMistake(f"{words[0]!r} is not a command of sorl{similar} (--help lists the commands)")
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {about}" for name, (_, about) in COMMANDS.items())
    parser = Parser(
        prog="sorl",
        usage="sorl COMMAND [ARGUMENTS]",
        description=f"Turn-level GRPO and PPO for multi-turn LLM agents.\n\ncommands:\n{commands}",
        epilog="`sorl COMMAND --help` lists the arguments of a command.",
    )
    parser.add_argument("--version", action="version", version=f"sorl-trl {package_version()}")
    parser.parse_args(words)
    parser.print_help()


def _show(shipped: Shipped, words: Sequence[str]) -> None:
    """Run `sorl recipes` or `sorl configs`."""
    about = f"Lists the {shipped.command} in the package, or prints one."
    parser = Parser(prog=f"sorl {shipped.command}", description=about)
    parser.add_argument("name", nargs="?", help="which one to print; without it, they are listed")
    name = parser.parse_args(words).name
    shown = shipped.listing() if name is None else shipped.find(name, parser.prog).read_text(encoding="utf-8")
    print(shown.rstrip("\n"))


recipes = partial(_show, RECIPES)
configs = partial(_show, CONFIGS)

if __name__ == "__main__":
    sys.exit(main())
