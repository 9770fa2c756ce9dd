"""A closed world: facts, the passages that state them, and questions of one or more hops about them.

A world is made from a table of facts. Each passage is a sentence that states one fact, and its title is the fact's
subject, so that a search for a bare name finds an arbitrary fact about it. Questions name a relation by another word
than passages do, so that a policy must learn what to search for.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sorl_trl.qa import Question, write_questions
from sorl_trl.search import write_corpus
from sorl_trl.types import Passage

CORPUS_FILE = "corpus.jsonl"
TRAIN_FILE = "train.jsonl"
EVALUATION_FILE = "eval.jsonl"
QUESTION = "what is the {nouns} of {subject} ?"


@dataclass(frozen=True)
class Relation:
    """One kind of fact, which relates subjects of one kind to objects of another."""

    name: str
    subject_kind: str
    object_kind: str
    noun: str
    """The word that questions use."""
    sentence: str
    """How passages state it, with `{subject}` and `{object}`. For a word tokenizer, spaces set every word apart."""
    keyword: str
    """The word of `sentence` that sets this relation's passages apart from others about the same subject."""
    asked: bool = True
    """Whether to ask questions about it. A relation with few answers is only stated, because they could be guessed."""


Facts = Mapping[str, Mapping[str, tuple[str, ...]]]
"""Relation name -> subject -> objects, one or more."""


@dataclass(frozen=True)
class WorldSize:
    """How many questions to draw, and how they divide by number of hops."""

    train_questions: int = 2000
    evaluation_questions: int = 200
    hop_shares: tuple[float, ...] = (0.5, 0.5)
    """The shares of questions with one hop, with two, and so on. They sum to 1."""

    def by_hops(self, questions: int) -> list[int]:
        """Divide a number of questions into those with one hop, with two, and so on."""
        more = [round(questions * share) for share in self.hop_shares[1:]]
        return [questions - sum(more), *more]


@dataclass(frozen=True)
class World:
    """Passages and questions about the same facts.

    A question's metadata has its `hops`, its `relations` (names, in the order they are followed) and its `subject`.
    """

    name: str
    relations: tuple[Relation, ...]
    passages: tuple[Passage, ...]
    train: tuple[Question, ...]
    evaluation: tuple[Question, ...]

    def write(self, directory: str | Path) -> Path:
        """Write `corpus.jsonl`, `train.jsonl` and `eval.jsonl` into `directory`, and return it as a path."""
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        write_corpus(self.passages, target / CORPUS_FILE)
        write_questions(self.train, target / TRAIN_FILE)
        evaluation = list(self.evaluation)
        random.Random(self.name).shuffle(evaluation)  # or the first hundred would all have one hop
        write_questions(evaluation, target / EVALUATION_FILE)
        return target

    def guess_rate(self) -> float:
        """The exact match on `evaluation`, in [0, 1], if a relation's commonest answer in `train` is always given."""
        answers: dict[tuple[str, ...], Counter[str]] = {}
        for question in self.train:
            counts = answers.setdefault(tuple(question.metadata["relations"]), Counter())
            counts.update(question.golden_answers)
        hits = 0
        for question in self.evaluation:
            counts = answers.get(tuple(question.metadata["relations"]), Counter())
            hits += any(guess in question.golden_answers for guess, _ in counts.most_common(1))
        return hits / len(self.evaluation)


def build_world(
    name: str, relations: Sequence[Relation], facts: Facts, seed: int, size: WorldSize, question: str = QUESTION
) -> World:
    """State the facts as passages in a random order, and draw questions without repetition.

    The order is random because engines break ties by it. Train and evaluation questions are disjoint. Raises
    ValueError if the facts give fewer questions than `size` asks for.
    """
    rng = random.Random(f"{name}/{seed}")
    passages = _passages(relations, facts)
    rng.shuffle(passages)
    asked = [relation for relation in relations if relation.asked]
    number = size.train_questions + size.evaluation_questions
    train: list[_Path] = []
    evaluation: list[_Path] = []
    counts = zip(size.by_hops(number), size.by_hops(size.evaluation_questions), strict=True)
    for hops, (drawn, held) in enumerate(counts, start=1):
        paths = rng.sample(_paths(asked, facts, hops), drawn) if drawn else []
        evaluation += paths[:held]
        train += paths[held:]
    rng.shuffle(train)
    return World(
        name=name,
        relations=tuple(relations),
        passages=tuple(Passage(id=f"{name}-{i}", title=title, text=text) for i, (title, text) in enumerate(passages)),
        train=_numbered(train, f"{name}-train", question),
        evaluation=_numbered(evaluation, f"{name}-eval", question),
    )


@dataclass(frozen=True)
class _Path:
    """A question without its id: it leads from a subject along relations to the answers."""

    subject: str
    relations: tuple[Relation, ...]
    answers: tuple[str, ...]

    def text(self, question: str) -> str:
        nouns = " of the ".join(relation.noun for relation in reversed(self.relations))
        return question.format(nouns=nouns, subject=self.subject)


def _passages(relations: Sequence[Relation], facts: Facts) -> list[tuple[str, str]]:
    """The (title, text) of every fact. The title is its subject."""
    return [
        (subject, relation.sentence.format(subject=subject, object=answer))
        for relation in relations
        for subject, objects in facts[relation.name].items()
        for answer in objects
    ]


def _paths(relations: Sequence[Relation], facts: Facts, hops: int) -> list[_Path]:
    """Paths whose intermediate objects are unique, so that the answer does not depend on which fact a search found."""
    return [
        _Path(subject, chain, answers)
        for chain in itertools.product(relations, repeat=hops)
        if all(first.object_kind == second.subject_kind for first, second in itertools.pairwise(chain))
        for subject in facts[chain[0].name]
        if (answers := _follow(subject, chain, facts))
    ]


def _follow(subject: str, chain: Sequence[Relation], facts: Facts) -> tuple[str, ...]:
    """The objects at the end of the chain; none if an intermediate object is missing or not unique."""
    objects: tuple[str, ...] = (subject,)
    for relation in chain:
        objects = facts[relation.name].get(objects[0], ()) if len(objects) == 1 else ()
    return objects


def _numbered(paths: Sequence[_Path], prefix: str, question: str) -> tuple[Question, ...]:
    return tuple(
        Question(
            id=f"{prefix}-{i}",
            question=path.text(question),
            golden_answers=path.answers,
            metadata={
                "hops": len(path.relations),
                "relations": [relation.name for relation in path.relations],
                "subject": path.subject,
            },
        )
        for i, path in enumerate(paths)
    )
