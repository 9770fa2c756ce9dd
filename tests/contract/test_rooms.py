"""The rooms of the package: small enough to live in, in no circle, and drawn as they are."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from docs import rooms as drawing

MOST_FILES = 14


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in drawing.SOURCE.rglob("*.py")}), ids=lambda f: f.name
)
def test_a_room_has_few_files_and_says_what_lives_there(folder: Path) -> None:
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert len(files) <= MOST_FILES
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert said and said.splitlines()[0].endswith(".")


@pytest.fixture(scope="module")
def rooms() -> dict[str, drawing.Room]:
    return drawing.read_rooms(drawing.SOURCE)


def test_no_circle(rooms: dict[str, drawing.Room]) -> None:
    assert drawing.circle(rooms) == []


def test_a_circle_is_seen() -> None:
    rooms = {name: drawing.Room(name, imports={to}) for name, to in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "a"))}
    assert drawing.circle(rooms) == ["a", "b", "c", "d"]


def test_the_pictures_are_up_to_date(rooms: dict[str, drawing.Room]) -> None:
    page = drawing.PAGE.read_text(encoding="utf-8")
    assert drawing.renewed(page, drawing.picture(rooms)) == page, "run `python docs/rooms.py`"
