"""The YAML files that ship with the package: recipes, and configs for accelerate."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from sorl_trl.command_line import UserMistake

PACKAGE = Path(__file__).parent


@dataclass(frozen=True)
class Shipped:
    """A folder of YAML files, whose names are chosen from where a file could be named as well."""

    folder: str
    """In the package; at the root of the repository it has the same name."""
    kind: str
    command: str
    """The subcommand of `sorl` that lists them."""
    option: str
    """The argument of `sorl train` that takes a name or a file."""

    @property
    def paths(self) -> dict[str, Path]:
        """Name -> file, in alphabetical order."""
        return {path.stem: path for path in sorted((PACKAGE / self.folder).glob("*.yaml"))}

    def find(self, name: str, argument: str = "") -> Path:
        """The user's own file of this path, else ours of this name; `argument` says who named it.

        Raises:
            UserMistake: There is neither.
        """
        if Path(name).is_file():
            return Path(name)
        if name in self.paths:
            return self.paths[name]
        ours = f"one of our {self.kind}s (`sorl {self.command}` lists them)"
        raise UserMistake(f"{argument or self.option}: {name!r} is neither a file nor the name of {ours}")

    def listing(self) -> str:
        """A line for each: its name, and the first sentence of the comment that it begins with."""
        width = max(map(len, self.paths))
        lines = [f"{name:{width}}  {_first_sentence(path)}" for name, path in self.paths.items()]
        usage = f"`sorl train {self.option} NAME` takes one, `sorl {self.command} NAME > FILE` copies one out."
        return "\n".join([*lines, "", usage])


RECIPES = Shipped("recipes", "recipe", "recipes", "--config")
CONFIGS = Shipped("accelerate_configs", "accelerate config", "configs", "--accelerate_config")


def _first_sentence(path: Path) -> str:
    comment = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    sentence, _, _ = " ".join(line.lstrip("# ") for line in comment).partition(". ")
    return sentence.rstrip(".") + "."
