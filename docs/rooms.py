"""Draws the rooms of the package and what they import: `python docs/rooms.py` renews the pictures in architecture.md.

A room is a folder of modules, or a module that stands alone: at the top, or beside folders. `--check` exits with 1
where the pictures are out of date, `--source` reads another copy of the package and prints them.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE / "architecture.md"
SOURCE = HERE.parent / "src" / "sorl_trl"
BEGIN, END = "<!-- rooms: made by docs/rooms.py -->", "<!-- end of rooms -->"


@dataclass
class Room:
    """What stands in a folder itself, not in its own folders, or a single module."""

    name: str
    files: int = 0
    lines: int = 0
    longest: tuple[int, str] = (0, "")
    """Lines and name of its longest function."""
    imports: set[str] = field(default_factory=set)
    """The rooms that its modules import."""


def read_rooms(source: Path) -> dict[str, Room]:
    """Name -> room; without `__init__.py` of what is no room itself, which only hands on names."""
    rooms: dict[str, Room] = {}
    for path in sorted(source.rglob("*.py")):
        name = _room_of(path.relative_to(source).with_suffix("").parts, source)
        room = rooms.setdefault(name, Room(name))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        room.files += 1
        room.lines += len(path.read_text(encoding="utf-8").splitlines())
        room.longest = max(room.longest, *_functions(tree), (0, ""))
        imported = _imported(tree, path.relative_to(source), source)
        room.imports |= {_room_of(parts, source) for parts in imported} - {name}
    return rooms


def _room_of(parts: tuple[str, ...], source: Path) -> str:
    folder = source.joinpath(*parts[:-1])
    return "/".join(parts if any(folder.glob("*/__init__.py")) else parts[:-1])


def circle(rooms: dict[str, Room]) -> list[str]:
    """Rooms that import each other in a circle, `__init__.py` files aside; empty if there is none."""
    left = {name: {to for to in room.imports if _is_room(to)} for name, room in rooms.items() if _is_room(name)}
    while ends := [name for name, imports in left.items() if not imports & left.keys()]:
        for name in ends:
            del left[name]
    return sorted(left)


def _is_room(name: str) -> bool:
    return not name.endswith("__init__")


def _functions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1, node.name


def _imported(tree: ast.AST, file: Path, source: Path) -> Iterator[tuple[str, ...]]:
    """The module paths within the package that a module imports, `__init__` for a package's own file."""
    for node in _executed(tree):
        if isinstance(node, ast.ImportFrom):
            above = ["sorl_trl", *file.parent.parts][: len(file.parent.parts) + 2 - node.level] if node.level else []
            yield from _within([*above, *(node.module or "").split(".")], [name.name for name in node.names], source)
        elif isinstance(node, ast.Import):
            for name in node.names:
                yield from _within(name.name.split("."), [], source)


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node below, less those that only type checkers read."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")):
            yield node
            yield from _executed(node)


def _within(module: list[str], names: list[str], source: Path) -> Iterator[tuple[str, ...]]:
    parts = [part for part in module if part]
    if parts[:1] != ["sorl_trl"]:
        return
    inner = tuple(parts[1:])
    for each in [(*inner, name) for name in names] or [inner]:
        while each and not (source.joinpath(*each).is_dir() or source.joinpath(*each).with_suffix(".py").is_file()):
            each = each[:-1]
        if each:
            yield (*each, "__init__") if source.joinpath(*each).is_dir() else each


def picture(rooms: dict[str, Room]) -> str:
    """Diagrams and a table, in Markdown."""
    divided = sorted({name.split("/")[0] for name in rooms if "/" in name})
    return "\n\n".join([_packages(rooms), *(_inside(rooms, package) for package in divided), _table(rooms)])


def _packages(rooms: dict[str, Room]) -> str:
    """Packages and what they import, without what can be reached through others."""
    edges: dict[str, set[str]] = {}
    for room in rooms.values():
        package = room.name.split("/")[0]
        edges.setdefault(package, set()).update(name.split("/")[0] for name in room.imports)
    edges = {name: to - {name, "__init__"} for name, to in edges.items() if _is_room(name)}
    return _mermaid("What each package imports, less what it reaches through others:", _reduced(edges))


def _inside(rooms: dict[str, Room], package: str) -> str:
    """The rooms of a package and what they import of each other."""
    inner = {name: room for name, room in rooms.items() if name.startswith(f"{package}/") and _is_room(name)}
    edges = {name: {other for other in room.imports if other in inner} for name, room in inner.items()}
    count = sum(map(len, edges.values()))
    return _mermaid(f"`{package}/`: {len(edges)} rooms, {count} imports between them:", edges)


def _reduced(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    def reach(name: str) -> set[str]:
        return edges.get(name, set()).union(*[reach(other) for other in edges.get(name, set())], set())

    return {name: {to for to in ends if not any(to in reach(other) for other in ends)} for name, ends in edges.items()}


def _mermaid(title: str, edges: dict[str, set[str]]) -> str:
    lines = [f"    {name.replace('/', '_')}[{name}]" for name in sorted(edges)]
    lines += [
        f"    {name.replace('/', '_')} --> {to.replace('/', '_')}"
        for name in sorted(edges)
        for to in sorted(edges[name])
    ]
    return "\n".join([title, "", "```mermaid", "flowchart TD", *lines, "```"])


def _table(rooms: dict[str, Room]) -> str:
    head = ["| room | files | lines | longest function | imports |", "|---|---|---|---|---|"]
    rows = [
        f"| `{room.name}` | {room.files} | {room.lines} | {_longest(room)} | {' '.join(sorted(room.imports))} |"
        for room in rooms.values()
        if _is_room(room.name)
    ]
    return "\n".join([*head, *rows])


def _longest(room: Room) -> str:
    lines, name = room.longest
    return f"`{name}`, {lines}" if lines else ""


def renewed(page: str, made: str) -> str:
    """The page with its pictures replaced."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    parser.add_argument("--source", type=Path, help="print the pictures of this copy of the package instead")
    arguments = parser.parse_args()
    if arguments.source:
        print(picture(read_rooms(arguments.source)))
        return 0
    page = PAGE.read_text(encoding="utf-8")
    new = renewed(page, picture(read_rooms(SOURCE)))
    if arguments.check:
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
