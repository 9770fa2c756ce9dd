"""The YAML files that ship with the package: recipes, and configs for accelerate. `sorl recipes`, `sorl configs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path

import yaml

from sorl_trl.command_line import Parser, UserMistake, mistakes, separate_config

PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Shipped:
    """A folder of YAML files, whose names are chosen from where a file could be named as well."""

    folder: str
    """In the package; at the root of the repository it has the same name."""
    kind: str
    command: str
    option: str
    """The argument of `sorl train` that takes a name or a file."""
    about: str
    """What there is to know of all of them."""

    @property
    def paths(self) -> dict[str, Path]:
        """Name -> file, in alphabetical order."""
        return {path.stem: path for path in sorted((PACKAGE / self.folder).glob("*.yaml"))}

    def get(self, name: str) -> Path:
        """The file of this name.

        Raises:
            UserMistake: There is none.
        """
        if name not in self.paths:
            raise UserMistake(f"{name!r} is the name of no {self.kind}{self._meant(name)}")
        return self.paths[name]

    def find(self, name: str) -> Path:
        """The user's own file of this path, else ours of this name.

        Raises:
            UserMistake: There is neither.
        """
        own = Path(name)
        if own.exists() and not own.is_dir():
            return own
        if name not in self.paths:
            raise UserMistake(
                f"{self.option}: {name!r} is neither a file nor the name of one of our {self.kind}s{self._meant(name)}"
            )
        return self.paths[name]

    def _meant(self, name: str) -> str:
        close = get_close_matches(name, self.paths, n=1)
        return f"; is it `{close[0]}`?" if close else f" (`sorl {self.command}` lists them)"

    def listing(self) -> str:
        """A line for each: its name, and the first sentence of the comment that it begins with."""
        paths = self.paths
        width = max(map(len, paths))
        lines = [f"{name:{width}}  {_first_sentence(path)}" for name, path in paths.items()]
        usage = f"`sorl train {self.option} NAME` takes one, `sorl {self.command} NAME -o FILE` copies one out."
        return "\n".join([*lines, "", *([self.about] if self.about else []), usage])


RECIPES = Shipped(
    folder="recipes",
    kind="recipe",
    command="recipes",
    option="--config",
    about="Paths in a recipe start where a command is run. Recipes without a model's name are for a folder in which\n"
    "`sorl quickstart` was run: they read what it leaves in runs/quickstart.",
)
CONFIGS = Shipped("accelerate_configs", "accelerate config", "configs", "--accelerate_config", "")


def _first_sentence(path: Path) -> str:
    comment = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    sentence, _, _ = " ".join(line.lstrip("# ") for line in comment).partition(". ")
    return sentence.rstrip(".") + "."


def deepspeed_file(config: Path) -> Path | None:
    """The JSON file that an accelerate config names, where it lies beside the config and not where the path points."""
    with mistakes(str(config)):
        content = yaml.safe_load(config.read_text(encoding="utf-8"))
    section = content.get("deepspeed_config") if isinstance(content, dict) else None
    named = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    if not isinstance(named, str) or Path(named).is_file():
        return None
    beside = config.with_name(Path(named).name)
    return beside if beside.is_file() else None


def with_recipe(words: Sequence[str]) -> list[str]:
    """A command line whose `--config` names a file: that of the recipe, where it names one of ours.

    Raises:
        UserMistake: No name follows, or there is neither a file nor a recipe of that name.
    """
    words = separate_config(words)
    for place in (i for i, word in enumerate(words[:-1]) if word == "--config"):
        words[place + 1] = str(RECIPES.find(words[place + 1]))
    return words


def recipes(words: Sequence[str] | None = None) -> None:
    """`sorl recipes`."""
    _show(RECIPES, words)


def configs(words: Sequence[str] | None = None) -> None:
    """`sorl configs`."""
    _show(CONFIGS, words)


def _show(shipped: Shipped, words: Sequence[str] | None) -> None:
    what = f"The {shipped.kind}s that ship with the package: lists them, prints one, or copies it out."
    parser = Parser(prog=f"sorl {shipped.command}", description=what)
    parser.add_argument("name", nargs="?", help="of which one; without it they are listed")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="copy it to FILE, which must not exist yet")
    options = parser.parse_args(words)
    if options.output is not None and options.name is None:
        raise UserMistake(f"--output goes with the name of one {shipped.kind}")
    if options.name is None:
        print(shipped.listing())
    elif options.output is None:
        print(shipped.get(options.name).read_text(encoding="utf-8"), end="")
    else:
        with mistakes():
            for copy in copy_out(shipped.get(options.name), options.output):
                print(copy)


def copy_out(source: Path, target: Path) -> list[Path]:
    """Copy one of the files, and beside it the JSON file that it names.

    Raises:
        OSError: `target` exists, or another JSON file of that name does, or its folder does not.
    """
    json_file = deepspeed_file(source)
    copies = {target: source} | ({target.with_name(json_file.name): json_file} if json_file else {})
    if json_file and (beside := target.with_name(json_file.name)).exists():
        if beside.read_bytes() != json_file.read_bytes():
            raise FileExistsError(f"{beside}: {target.name} needs another file of this name: copy into another folder")
        del copies[beside]
    if target.exists():
        raise FileExistsError(f"{target}: there is a file of this name: name another place")
    for copy, original in copies.items():
        copy.write_bytes(original.read_bytes())
    return [*copies]
