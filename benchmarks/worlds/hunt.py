"""A world without questions: hunts of several turns, with an answer after each and a reward at the end alone.

The policy digs at a place per turn, and reads where to go from there: north or south until the row is right, then
west or east. A turn that names no place of the field is answered too, and costs as much as any other.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from datasets import Dataset
from examples.quickstart import Example, PolicyConfig, example_of, imitate, make_policy, store_policy, word_tokenizer
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from trl import GRPOTrainer

from benchmarks.worlds.questions import BenchmarkWorld, Score
from sorl_trl.rollout import TurnEnd, generate_turns, model_engine

FOUND, LOST, NO_PLACE = "found", "lost", "no such place"
"""What ends a hunt, well or badly, and the answer to a turn that digs nowhere."""
DIRECTIONS = ("north", "south", "west", "east")
NAME_LETTERS = 3
_DIG = re.compile(r"dig at column (\d+) row (\d+)")
TURNS = 8
"""After so many the treasure is lost."""
MAX_TURN_TOKENS = 10
"""A well-formed turn has 7, its end included: this is enough to ramble, and to be told so."""
SHORTEST, LONGEST = 9, 15
"""Sides of a field."""
UNSEEN_FIELDS = 200
TRAJECTORIES = 10_000
"""Of a hunter, for the policy to imitate."""


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
        """All that the policy reads. The name reveals nothing about the place."""
        return f"field {' '.join(self.name)} has {self.columns} columns {self.rows} rows"


class Hunt:
    """One attempt in one field, within `TURNS`."""

    def __init__(self, field: Field) -> None:
        self.field = field
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
        return self.found or self.turns >= TURNS

    def answer(self, turn: str) -> str:
        """What the policy reads after this turn, whatever is written in it."""
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


WALK = 0.6
"""The hunter's chance of going one step from where it has dug last, and no further: the right way, but a long one."""
STRAY = 0.2
"""Of digging anywhere in the field, whatever is known."""
SLIP = 0.05
"""Of leaving out a word, so that the turn names no place."""


class Hunter:
    """Halves what is left of rows and columns, but for its mistakes, which `seed` decides."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"hunter/{seed}")

    def turn(self, hunt: Hunt) -> str:
        """The hunter's next turn; it looks at the answers so far, not at the treasure."""
        column, row = (hunt.west + hunt.east) // 2, (hunt.north + hunt.south) // 2
        if hunt.last and self._rng.random() < WALK:
            column, row = _step(hunt.last[0], column), _step(hunt.last[1], row)
        if self._rng.random() < STRAY:
            column, row = self._rng.randint(1, hunt.field.columns), self._rng.randint(1, hunt.field.rows)
        words = f"dig at column {column} row {row}".split()
        if self._rng.random() < SLIP:
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


def make_fields(seed: int) -> Fields:
    """All fields of a seed: some of the possible ones to judge by, each of the others once to train in."""
    rng = random.Random(f"fields/{seed}")
    sides = range(SHORTEST, LONGEST + 1)
    places = [
        (columns, rows, column, row)
        for columns, rows in product(sides, sides)
        for column, row in product(range(1, columns + 1), range(1, rows + 1))
    ]
    names = ["".join(letters) for letters in product(ascii_lowercase, repeat=NAME_LETTERS)]
    rng.shuffle(places)
    rng.shuffle(names)
    laid_out = [Field(name, *place) for name, place in zip(names, places, strict=False)]
    practised = rng.choices(places[UNSEEN_FIELDS:], k=TRAJECTORIES)
    return Fields(
        train=tuple(laid_out[UNSEEN_FIELDS:]),
        unseen=tuple(laid_out[:UNSEEN_FIELDS]),
        practice=tuple(Field(name, *place) for name, place in zip(names[len(places) :], practised, strict=False)),
    )


def vocabulary() -> list[str]:
    """Texts with every word that a hunt may take."""
    numbers = " ".join(map(str, range(1, LONGEST + 1)))
    turn = "columns 1 to 1 rows 1 to 1 dig at column 1 row 1"
    return [Field(ascii_lowercase, 1, 1, 1, 1).prompt, turn, numbers, "go", *DIRECTIONS, FOUND, LOST, NO_PLACE]


@dataclass
class Record:
    """A hunt in token ids: what was written and read after the prompt, and by whom."""

    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    env_mask: list[int] = field(default_factory=list)
    """1 on tokens of the policy, 0 on answers."""

    def add(self, ids: Sequence[int], of_policy: bool) -> None:
        self.completion_ids += ids
        self.env_mask += [int(of_policy)] * len(ids)

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.completion_ids


Writer = Callable[[list[int], list[list[int]]], list[list[int]]]
"""Given the numbers of the hunts that go on, and what was read and written in each: their next turns."""


def play(hunts: Sequence[Hunt], tokenizer: PreTrainedTokenizerBase, write: Writer) -> list[Record]:
    """Play all hunts to their end, a turn of each at a time. The last answer of each ends in an end-of-text token."""
    end = [tokenizer.eos_token_id]
    records = [Record(ids) for ids in encode(tokenizer, [hunt.field.prompt for hunt in hunts])]
    while active := [number for number, hunt in enumerate(hunts) if not hunt.over]:
        turns = write(active, [records[number].ids for number in active])
        texts = tokenizer.batch_decode([ids[:-1] if ids[-1:] == end else ids for ids in turns])
        answers = [hunts[number].answer(text) for number, text in zip(active, texts, strict=True)]
        for number, turn, answer in zip(active, turns, encode(tokenizer, answers), strict=True):
            records[number].add(turn, of_policy=True)
            records[number].add(answer + (end if hunts[number].over else []), of_policy=False)
    return records


def play_with_model(
    hunts: Sequence[Hunt], tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, config: GenerationConfig
) -> list[Record]:
    """As `play`, with a policy that samples with `config`."""
    engine = model_engine(model, TurnEnd(tokenizer, (), [tokenizer.eos_token_id]), config)

    def write(active: list[int], contexts: list[list[int]]) -> list[list[int]]:
        turns = generate_turns(engine, contexts, [MAX_TURN_TOKENS] * len(contexts), active)
        return [list(turn.token_ids) for turn in turns]

    engine.open(len(hunts))
    try:
        with torch.no_grad():
            return play(hunts, tokenizer, write)
    finally:
        engine.close()


def hunt_rollout(fields: Sequence[Field]) -> Callable[[list[str], GRPOTrainer], dict[str, Any]]:
    """A `rollout_func`, for `trl.GRPOTrainer` and the trainers of this package alike; prompts name their fields."""
    by_prompt = {field.prompt: field for field in fields}

    def roll_out(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        hunts = [Hunt(by_prompt[prompt]) for prompt in prompts]
        model = trainer.accelerator.unwrap_model(trainer.model)
        records = play_with_model(hunts, trainer.processing_class, model, trainer.generation_config)
        return {
            "prompt_ids": [record.prompt_ids for record in records],
            "completion_ids": [record.completion_ids for record in records],
            "env_mask": [record.env_mask for record in records],
            "logprobs": None,
            "found": [hunt.found for hunt in hunts],
        }

    return roll_out


def found_reward(found: Sequence[bool], **_: Any) -> list[float]:
    """1 for a treasure, 0 without."""
    return [float(each) for each in found]


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return ids


ANSWER_TOKENS = 4
"""At most, an end of text included."""
TRAIN_FILE, UNSEEN_FILE = "train.json", "unseen.json"
POLICY = PolicyConfig(72, 2, 4)
IMITATION: dict[str, Any] = {"steps": 700, "batch_size": 16, "learning_rate": 3e-3, "seed": 0}
"""How the policy learns from a hunter, before it hunts for itself. The seed is that of the order of trajectories."""


class HuntWorld(BenchmarkWorld):
    """Fields to hunt in, others to be judged in, and a policy that watched a hunter in fields of a third kind."""

    title = "Hunts"
    description = "a game of up to 8 turns of seven tokens, with an answer after each"
    name = f"hunt-{TURNS}-{SHORTEST}-{LONGEST}-{POLICY.hidden_size}x{POLICY.layers}"
    max_completion_length = TURNS * (MAX_TURN_TOKENS + ANSWER_TOKENS)
    most_turns = TURNS
    settings = (TURNS, SHORTEST, LONGEST, MAX_TURN_TOKENS, WALK, STRAY, SLIP, TRAJECTORIES, POLICY, IMITATION)

    def build(self, seed: int, target: Path, cache: Path) -> Path:
        fields, tokenizer = make_fields(seed), word_tokenizer(vocabulary())
        _write(target / TRAIN_FILE, fields.train)
        _write(target / UNSEEN_FILE, fields.unseen)
        model = make_policy(tokenizer, POLICY, seed, 2 * self.max_completion_length)
        imitate(model, watch(fields.practice, tokenizer, seed), **IMITATION)
        return store_policy(model, tokenizer, cache / f"{self.name}-{seed}")

    def trainer_arguments(self, folder: Path) -> dict[str, Any]:
        fields = _read(folder / TRAIN_FILE)
        return {
            "reward_funcs": found_reward,
            "train_dataset": Dataset.from_list([{"prompt": field.prompt} for field in fields]),
            "rollout_func": hunt_rollout(fields),
        }

    def examination(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> Score:
        fields = _read(folder / UNSEEN_FILE)

        def score(model: PreTrainedModel, config: GenerationConfig) -> float:
            hunts = [Hunt(field) for field in fields]
            play_with_model(hunts, tokenizer, model, config)
            return sum(hunt.found for hunt in hunts) / len(hunts)

        return score


def watch(fields: Sequence[Field], tokenizer: PreTrainedTokenizerFast, seed: int) -> list[Example]:
    """A hunter's hunt in each of the fields, for a policy to imitate."""
    hunter, hunts = Hunter(seed), [Hunt(field) for field in fields]
    end = tokenizer.eos_token_id

    def write(active: list[int], contexts: list[list[int]]) -> list[list[int]]:
        return [[*ids, end] for ids in encode(tokenizer, [hunter.turn(hunts[number]) for number in active])]

    records = play(hunts, tokenizer, write)
    return [example_of(record.prompt_ids, record.completion_ids, record.env_mask) for record in records]


def _write(path: Path, fields: Sequence[Field]) -> None:
    path.write_text(json.dumps([asdict(field) for field in fields]))


def _read(path: Path) -> list[Field]:
    return [Field(**each) for each in json.loads(path.read_text())]
