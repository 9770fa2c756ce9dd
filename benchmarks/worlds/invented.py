"""Invented worlds: the same vocabulary for every seed, other facts, nothing that could be known beforehand."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from examples.quickstart.world import Relation, World, WorldSize, build_world

RELATIONS = (
    Relation("hometown", "person", "city", "hometown", "{subject} was born in {object} .", "born"),
    Relation("employer", "person", "company", "employer", "{subject} works for {object} .", "works"),
    Relation("seat", "company", "city", "seat", "{subject} resides at {object} .", "resides"),
    Relation("founder", "company", "person", "founder", "{subject} was started by {object} .", "started"),
    Relation("land", "city", "land", "land", "{subject} lies in {object} .", "lies"),
    Relation("mayor", "city", "person", "mayor", "{subject} obeys {object} .", "obeys"),
    Relation("ruler", "land", "person", "ruler", "{subject} is reigned over by {object} .", "reigned"),
)


@dataclass(frozen=True)
class Population:
    """How many of each kind a world has, and how many words the names of its people are made from."""

    people: int = 300
    companies: int = 80
    cities: int = 90
    lands: int = 20
    first_names: int = 60
    last_names: int = 90


def build_invented(seed: int, population: Population | None = None, size: WorldSize | None = None) -> World:
    """Build a world of people, companies, cities and lands. Worlds of different seeds share words, not facts.

    Raises:
        ValueError: there are fewer facts than `size` asks for.
    """
    population = population or Population()
    rng = random.Random(f"invented/{seed}")
    kinds = _names(population, rng)
    facts = {relation.name: _invent(relation, kinds, rng) for relation in RELATIONS}
    return build_world("invented", RELATIONS, facts, seed, size or WorldSize(train_questions=1000))


def _invent(relation: Relation, kinds: Mapping[str, Sequence[str]], rng: random.Random) -> dict[str, tuple[str, ...]]:
    return {subject: (rng.choice(kinds[relation.object_kind]),) for subject in kinds[relation.subject_kind]}


def _names(population: Population, rng: random.Random) -> dict[str, list[str]]:
    words = iter(invented_words())
    first, last, companies, cities, lands = (
        [next(words) for _ in range(number)]
        for number in (
            *(population.first_names, population.last_names),
            *(population.companies, population.cities, population.lands),
        )
    )
    people = _full_names(first, last, population.people, rng)
    return {"person": people, "company": companies, "city": cities, "land": lands}


def invented_words() -> list[str]:
    """A fixed list of pronounceable words: no seed changes it, so one tokenizer fits every invented world."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    return random.Random("words").sample([a + b + c for a in syllables for b in syllables for c in "lnrs"], 4000)


def _full_names(first: Sequence[str], last: Sequence[str], number: int, rng: random.Random) -> list[str]:
    pairs = rng.sample(range(len(first) * len(last)), number)
    return [f"{first[pair % len(first)]} {last[pair // len(first)]}" for pair in pairs]
