"""What ships with the package: recipes, configs for accelerate, and its version."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path

from sorl_trl.command_line import UserMistake

PACKAGE = Path(__file__).parent


@dataclass(frozen=True)
class Shipped:
    """A folder of YAML files. An argument takes the name of one of them or the path of a user's own file."""

    folder: str
    """The folder in the package. At the root of the repository it has the same name."""
    kind: str
    command: str
    """The subcommand of `sorl` that lists them."""
    option: str
    """The argument of `sorl train` that takes a name or a path."""

    @property
    def paths(self) -> dict[str, Path]:
        """Name -> file, in alphabetical order."""
        return {path.stem: path for path in sorted((PACKAGE / self.folder).glob("*.yaml"))}

    def find(self, name: str, argument: str = "") -> Path:
        """Find the user's own file with this path, or ours with this name. `argument` is where it was given.

        Raises:
            UserMistake: Neither exists.
        """
        if Path(name).is_file():
            return Path(name)
        if name in self.paths:
            return self.paths[name]
        ours = f"one of our {self.kind}s (`sorl {self.command}` lists them)"
        raise UserMistake(f"{argument or self.option}: {name!r} is neither a file nor the name of {ours}")

    def listing(self) -> str:
        """One line per file: its name, and the first sentence of the comment at its top."""
        width = max(map(len, self.paths))
        lines = [f"{name:{width}}  {_first_sentence(path)}" for name, path in self.paths.items()]
        usage = f"`sorl train {self.option} NAME` takes one, `sorl {self.command} NAME > FILE` copies one out."
        return "\n".join([*lines, "", usage])


RECIPES = Shipped("recipes", "recipe", "recipes", "--config")
CONFIGS = Shipped("accelerate_configs", "accelerate config", "configs", "--accelerate_config")


def package_version() -> str:
    """The version of the installed package; "unknown" in a source tree that is not installed."""
    try:
        return version("sorl-trl")
    except PackageNotFoundError:
        return "unknown"


def _first_sentence(path: Path) -> str:
    comment = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    sentence, _, _ = " ".join(line.lstrip("# ") for line in comment).partition(". ")
    return sentence.rstrip(".") + "."
