"""A hunt for a treasure in a field: its rules, fields to hunt in, and a hunter who knows how, and does it badly.

The policy digs at a place per turn, and reads where to go from there: north or south until the row is right, then
west or east. A turn that names no place of the field is answered too, and costs as much as any other.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from itertools import product
from string import ascii_lowercase

FOUND, LOST, NO_PLACE = "found", "lost", "no such place"
"""What ends a hunt, well or badly, and the answer to a turn that digs nowhere."""
DIRECTIONS = ("north", "south", "west", "east")
NAME_LETTERS = 3
_DIG = re.compile(r"dig at column (\d+) row (\d+)")


@dataclass(frozen=True)
class HuntRules:
    """How hard a hunt is."""

    turns: int = 8
    """After so many the treasure is lost."""
    shortest: int = 9
    """Side of a field."""
    longest: int = 15
    max_turn_tokens: int = 10
    """A well-formed turn has 7, its end included: this is enough to ramble, and to be told so."""


@dataclass(frozen=True)
class Field:
    """A rectangle of places, counted from 1 in the north-west, and where in it the treasure lies."""

    name: str
    columns: int
    rows: int
    column: int
    row: int

    @property
    def prompt(self) -> str:
        """All that the policy is told. The name says nothing about the place."""
        return f"field {' '.join(self.name)} has {self.columns} columns {self.rows} rows"


class Hunt:
    """One attempt in one field, within a number of turns."""

    def __init__(self, field: Field, rules: HuntRules) -> None:
        self.field = field
        self.rules = rules
        self.turns = 0
        self.found = False
        self.west, self.north = 1, 1
        """The first column and row in which the treasure may still lie, as far as the answers tell."""
        self.east, self.south = field.columns, field.rows
        """The last ones."""
        self.last: tuple[int, int] | None = None
        """Where it was dug last, column and row."""

    @property
    def over(self) -> bool:
        return self.found or self.turns >= self.rules.turns

    def answer(self, turn: str) -> str:
        """What the policy reads after this turn, whatever is written in it. Raises RuntimeError after the end."""
        if self.over:
            raise RuntimeError(f"the hunt was over after {self.turns} turns; begin another one")
        self.turns += 1
        place = self._place(turn)
        self.last = place or self.last
        self.found = place == (self.field.column, self.field.row)
        if self.over:
            return FOUND if self.found else LOST
        return f"go {self._direction(*place)}" if place else NO_PLACE

    def _place(self, turn: str) -> tuple[int, int] | None:
        match = _DIG.fullmatch(turn)
        if match is None:
            return None
        column, row = int(match[1]), int(match[2])
        return (column, row) if 1 <= column <= self.field.columns and 1 <= row <= self.field.rows else None

    def _direction(self, column: int, row: int) -> str:
        if row > self.field.row:
            self.south = min(self.south, row - 1)
            return "north"
        if row < self.field.row:
            self.north = max(self.north, row + 1)
            return "south"
        self.north = self.south = row
        if column > self.field.column:
            self.east = min(self.east, column - 1)
            return "west"
        self.west = max(self.west, column + 1)
        return "east"


@dataclass(frozen=True)
class HunterNoise:
    """The chances of the hunter's mistakes in a turn, each in [0, 1]. With all of them at 0 it makes none."""

    walk: float = 0.6
    """Of going one step from where it has dug last, and no further: the right way, but a long one."""
    stray: float = 0.2
    """Of digging anywhere in the field, whatever is known."""
    slip: float = 0.05
    """Of leaving out a word, so that the turn names no place."""


class Hunter:
    """Halves what is left of rows and columns, but for its mistakes.

    Args:
        noise: its mistakes.
        seed: of its mistakes.
    """

    def __init__(self, noise: HunterNoise, seed: int) -> None:
        self._noise = noise
        self._rng = random.Random(f"hunter/{seed}")

    def turn(self, hunt: Hunt) -> str:
        """The hunter's next turn; it looks at the answers so far, not at the treasure."""
        column, row = (hunt.west + hunt.east) // 2, (hunt.north + hunt.south) // 2
        if hunt.last and self._rng.random() < self._noise.walk:
            column, row = _step(hunt.last[0], column), _step(hunt.last[1], row)
        if self._rng.random() < self._noise.stray:
            column, row = self._rng.randint(1, hunt.field.columns), self._rng.randint(1, hunt.field.rows)
        words = f"dig at column {column} row {row}".split()
        if self._rng.random() < self._noise.slip:
            del words[self._rng.randrange(len(words))]
        return " ".join(words)


def _step(here: int, there: int) -> int:
    return min(max(there, here - 1), here + 1)


@dataclass(frozen=True)
class Fields:
    """Fields of three kinds, all of different names. Those that judge have sides and a treasure of their own."""

    train: tuple[Field, ...]
    unseen: tuple[Field, ...]
    practice: tuple[Field, ...]
    """For the hunter; laid out as those of `train`."""


def make_fields(rules: HuntRules, seed: int, unseen: int, practice: int) -> Fields:
    """Make all fields of a seed: `unseen` of the possible ones to judge by, each of the others once to train in.

    Raises ValueError where there are fewer possible fields than `unseen`, or fewer names than fields.
    """
    rng = random.Random(f"fields/{seed}")
    sides = range(rules.shortest, rules.longest + 1)
    places = [
        (columns, rows, column, row)
        for columns, rows in product(sides, sides)
        for column, row in product(range(1, columns + 1), range(1, rows + 1))
    ]
    names = ["".join(letters) for letters in product(ascii_lowercase, repeat=NAME_LETTERS)]
    if unseen >= len(places) or len(places) + practice > len(names):
        raise ValueError(
            f"unseen={unseen} must be below the {len(places)} possible fields, "
            f"and practice={practice} at most {len(names) - len(places)}"
        )
    rng.shuffle(places)
    rng.shuffle(names)
    laid_out = [Field(name, *place) for name, place in zip(names, places, strict=False)]
    practised = rng.choices(places[unseen:], k=practice)
    return Fields(
        train=tuple(laid_out[unseen:]),
        unseen=tuple(laid_out[:unseen]),
        practice=tuple(Field(name, *place) for name, place in zip(names[len(places) :], practised, strict=False)),
    )


def vocabulary(rules: HuntRules) -> list[str]:
    """Texts with every word that a hunt may take."""
    numbers = " ".join(map(str, range(1, rules.longest + 1)))
    turn = "columns 1 to 1 rows 1 to 1 dig at column 1 row 1"
    return [Field(ascii_lowercase, 1, 1, 1, 1).prompt, turn, numbers, "go", *DIRECTIONS, FOUND, LOST, NO_PLACE]
