"""A world whose every fact changed once: who looks one up must compare two years to know what holds today."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from examples.quickstart import World, WorldSize
from examples.quickstart.world import Relation

from benchmarks.worlds.invented import RELATIONS, invented_words
from sorl_trl.qa import Question
from sorl_trl.types import Passage

HOPS = 3
"""Of every question: so many facts have to be looked up."""
OLD_YEARS, NEW_YEARS = range(11, 21), range(21, 31)
"""Of the two objects of a fact, one has an old year and the other a new one: that much can be seen at a glance, so
that a tiny policy which hardly writes anything down can choose as well as one that compares in writing."""
YEARS = (*OLD_YEARS, *NEW_YEARS)


@dataclass(frozen=True)
class Entry:
    """What was so from a year on."""

    year: int
    name: str

    def __str__(self) -> str:
        return f"{self.year} {self.name}"


Pair = tuple[Entry, Entry]
"""The two objects of a fact, in the order in which its passage names them, which is not that of the years."""


def current(pair: Pair) -> Entry:
    """The later entry: questions are about today."""
    return max(pair, key=lambda entry: entry.year)


DATED_RELATIONS = tuple(
    replace(relation, sentence=f"{{subject}} {relation.keyword} {{object}} .") for relation in RELATIONS
)
"""Those of the invented world. Their object is the text of a pair, as in `karo works 12 zel , 3 mor .`."""


NAMES = {"person": 200, "company": 80, "city": 90, "land": 20}
"""How many of each kind there are. All names are single words, the same ones for every seed."""


def build_dated(seed: int, size: WorldSize) -> World:
    """Build a world and questions of three hops, such as `what is karo 's employer 's seat 's land ?`.

    Worlds of different seeds share names, not facts. Of `size` only the numbers of questions count; train and
    evaluation questions are disjoint.

    Args:
        seed: of the facts and the questions.
        size: how many questions to draw; its `hop_shares` are not asked.
    """
    rng = random.Random(f"dated/{seed}")
    words = iter(invented_words())
    kinds = {kind: [next(words) for _ in range(number)] for kind, number in NAMES.items()}
    facts = {relation.name: _invent(relation, kinds, rng) for relation in DATED_RELATIONS}
    passages = [
        (subject, relation.sentence.format(subject=subject, object=" , ".join(map(str, pair))))
        for relation in DATED_RELATIONS
        for subject, pair in facts[relation.name].items()
    ]
    rng.shuffle(passages)
    number = size.train_questions + size.evaluation_questions
    drawn = list(_draw(number, kinds, facts, random.Random(f"dated/{seed}/{HOPS}")))
    return World(
        name="dated",
        relations=DATED_RELATIONS,
        passages=tuple(Passage(id=f"dated-{i}", title=title, text=text) for i, (title, text) in enumerate(passages)),
        train=tuple(drawn[size.evaluation_questions :]),
        evaluation=tuple(drawn[: size.evaluation_questions]),
    )


def _invent(relation: Relation, kinds: Mapping[str, Sequence[str]], rng: random.Random) -> dict[str, Pair]:
    return {subject: _pair(kinds[relation.object_kind], rng) for subject in kinds[relation.subject_kind]}


def _pair(names: Sequence[str], rng: random.Random) -> Pair:
    years = [rng.choice(OLD_YEARS), rng.choice(NEW_YEARS)]
    rng.shuffle(years)
    first, second = (Entry(*entry) for entry in zip(years, rng.sample(names, 2), strict=True))
    return first, second


def _draw(
    number: int,
    kinds: Mapping[str, Sequence[str]],
    facts: Mapping[str, Mapping[str, Pair]],
    rng: random.Random,
) -> Iterator[Question]:
    """So many questions, no two of them equal."""
    seen: set[str] = set()
    while len(seen) < number:
        kind = rng.choice(list(kinds))
        subject = name = rng.choice(kinds[kind])
        steps = []
        for _ in range(HOPS):
            relation = rng.choice([each for each in DATED_RELATIONS if each.subject_kind == kind])
            steps.append(relation)
            name = current(facts[relation.name][name]).name
            kind = relation.object_kind
        path = "".join(f" 's {relation.noun}" for relation in steps)
        text = f"what is {subject}{path} ?"
        if text in seen:
            continue
        metadata = {
            "hops": HOPS,
            "subject": subject,
            "relations": [relation.name for relation in steps],
        }
        yield Question(id=f"dated-{len(seen)}", question=text, golden_answers=(name,), metadata=metadata)
        seen.add(text)
