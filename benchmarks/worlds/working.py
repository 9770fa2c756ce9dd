"""A world whose every fact changed once: who looks one up must compare two years to know what holds today."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from examples.quickstart import (
    ExpertNoise,
    PolicyConfig,
    ScriptedExpert,
    WarmStartConfig,
    World,
    warm_start,
)
from examples.quickstart.expert import UNKNOWN, observations_in
from examples.quickstart.world import Relation

from benchmarks.worlds.invented import RELATIONS, invented_words
from benchmarks.worlds.questions import PRACTICE_WORLDS, TRAIN_QUESTIONS, SearchWorld
from sorl_trl.qa import Question
from sorl_trl.rollout import EngineOptions, RolloutLimits
from sorl_trl.types import Passage

HOPS = 3
"""Of every question: so many facts have to be looked up."""
EVALUATION_QUESTIONS = 100
"""They judge."""
SEEDS_PER_POLICY = 4
"""Four seeds, counted from 1, start from the same policy: warm starts would otherwise take as long as the runs."""
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


def build_dated(seed: int) -> World:
    """Build a world and questions of three hops, such as `what is karo 's employer 's seat 's land ?`.

    Worlds of different seeds share names, not facts. Train and evaluation questions are disjoint.
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
    drawn = list(_draw(kinds, facts, random.Random(f"dated/{seed}/{HOPS}")))
    return World(
        name="dated",
        relations=DATED_RELATIONS,
        passages=tuple(Passage(id=f"dated-{i}", title=title, text=text) for i, (title, text) in enumerate(passages)),
        train=tuple(drawn[EVALUATION_QUESTIONS:]),
        evaluation=tuple(drawn[:EVALUATION_QUESTIONS]),
    )


def _invent(relation: Relation, kinds: Mapping[str, Sequence[str]], rng: random.Random) -> dict[str, Pair]:
    return {subject: _pair(kinds[relation.object_kind], rng) for subject in kinds[relation.subject_kind]}


def _pair(names: Sequence[str], rng: random.Random) -> Pair:
    years = [rng.choice(OLD_YEARS), rng.choice(NEW_YEARS)]
    rng.shuffle(years)
    first, second = (Entry(*entry) for entry in zip(years, rng.sample(names, 2), strict=True))
    return first, second


def _draw(
    kinds: Mapping[str, Sequence[str]], facts: Mapping[str, Mapping[str, Pair]], rng: random.Random
) -> Iterator[Question]:
    """All questions of a world, no two of them equal."""
    seen: set[str] = set()
    while len(seen) < TRAIN_QUESTIONS + EVALUATION_QUESTIONS:
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
        metadata = {"hops": HOPS, "subject": subject, "relations": [relation.name for relation in steps]}
        yield Question(id=f"dated-{len(seen)}", question=text, golden_answers=(name,), metadata=metadata)
        seen.add(text)


_QUERY = re.compile(r"<search>(.*?)</search>")
_ENTRY = re.compile(r"(\d+) (.+?)(?: ,| \.|$)")


@dataclass(frozen=True)
class WorkingNoise(ExpertNoise):
    """The chances of the clerk's mistakes, each in [0, 1].

    All are made in the working, and the action follows from it, as it does for those who imitate the clerk.
    """

    missing_keyword: float = 0.0
    wrong_keyword: float = 0.1
    """Of writing down another relation than the one that is asked next."""
    half_name: float = 0.0
    early_answer: float = 0.04
    """Of believing, after each search but the last, that nothing is left to be found."""
    wrong_entry: float = 0.12
    """Of taking the wrong one of the two entries of a fact, and so the other name."""


@dataclass(frozen=True)
class Fact:
    """A passage that was found, as far as the working needs it, and which of its entries was taken."""

    text: str
    pair: Pair
    taken: Entry

    @property
    def choice(self) -> str:
        """Which entry was taken, and its name.

        The word is the decision, and tells where to copy the name from: at one of two distances. A policy of two
        layers learns that in a few hundred steps. Behind a year, which stands in several places, it did not.
        """
        return f"{'former' if self.taken == self.pair[0] else 'latter'} {self.taken.name}"

    @property
    def comparison(self) -> str:
        """Which entry is the later one."""
        return f"of {self.pair[0]} and {self.pair[1]} later is {self.choice} ;"

    @property
    def record(self) -> str:
        """The whole fact and what follows from it."""
        first, second = self.pair
        return f"{self.text} first {first} , then {second} ; {self.comparison} so {self.choice} ."


@dataclass(frozen=True)
class Notes:
    """All that the working of one turn may mention."""

    subject: str
    steps: tuple[str, ...]
    """The noun of each hop."""
    facts: tuple[Fact, ...]
    name: str
    """At hand: the subject, or what was taken from the last fact."""
    relation: Relation | None
    """What to look up next; `None`: the name at hand is the answer."""

    @property
    def asked(self) -> str:
        return f"asked {self.subject} {' '.join(map(_step, self.steps))} ."

    @property
    def plan(self) -> str:
        steps = (f"step {place} of {len(self.steps)} {_step(noun)}" for place, noun in enumerate(self.steps, 1))
        return f"{' ; '.join(steps)} ."

    @property
    def left(self) -> str:
        """How many facts are found, and the steps that are left, or that none is."""
        rest = self.steps[len(self.facts) :] if self.relation else ()
        count = f"{len(self.facts)} of {len(self.steps)} found , {len(rest)} left ."
        return f"{count} left {' , '.join(map(_step, rest)) or 'nothing'} ."

    @property
    def conclusion(self) -> str:
        at_hand = self.facts[-1].choice if self.facts else self.name
        return f"so {at_hand} , {f'next {self.relation.noun}' if self.relation else 'done'} :"

    @property
    def action(self) -> str:
        if self.relation is None:
            return f"<answer> {self.name} </answer>"
        return f"<search> {self.name} {self.relation.keyword} </search>"


def _step(noun: str) -> str:
    return f"'s {noun}"


VERBOSITIES = (4, 10, 40, 80, 200)
"""About how many tokens a turn has."""
RECITAL = " ".join(invented_words()[1000:1120])
"""What the wordiest clerk recites first, always alike: no word of it is a name. Had it written its working three times
instead, a policy of two layers would have mixed them up."""


def working(notes: Notes, verbosity: int) -> list[str]:
    """What is written before an action: which entry was taken, what follows from it, why, or the plan as well.

    Earlier facts would have to be copied from where they stand in turns before: two layers take long to learn that.
    """
    last = notes.facts[-1] if notes.facts else None
    if verbosity == 4:
        return [last.choice.split()[0]] if last else []
    if verbosity == 10:
        return [notes.conclusion]
    if verbosity == 40:
        compared = [last.comparison] if last else []
        return [notes.asked, *compared, notes.left, notes.conclusion]
    recorded = [last.record] if last else []
    recited = [RECITAL] if verbosity == 200 else []
    return [*recited, notes.asked, notes.plan, *recorded, notes.left, notes.conclusion]


def words() -> Iterable[str]:
    """Texts with every word that a clerk may write and that no passage or question has."""
    yield from map(str, YEARS)
    yield from (relation.noun for relation in DATED_RELATIONS)
    yield from ("asked of and later is former latter ; first then so step , found left . next nothing done :",)
    yield from map(str, range(10))


class Clerk(ScriptedExpert):
    """Looks up one fact after the other, and writes its working down before each action.

    In a turn it compares the years of the last fact, writes down which entry is the later one, and looks up the next
    relation of its name. With the same seed it makes the same mistakes in the same turns, whatever the verbosity.

    Args:
        verbosity: one of `VERBOSITIES`.
        *args: as `ScriptedExpert`, with the prompts and relations of a dated world.
    """

    _noise: WorkingNoise

    def __init__(self, verbosity: int, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._verbosity = verbosity

    def _turn(self, question: Question, text: str) -> str:
        observations = observations_in(text)
        data = question.metadata
        steps = tuple(self._relations[name].noun for name in data["relations"])
        queried = [query.strip().rpartition(" ")[0] for query in _QUERY.findall(text)[1:]]
        mistakes = [self._rng.random() for _ in range(3)]
        facts = self._facts_of(observations, queried, mistakes[0] < self._noise.wrong_entry)
        name = facts[-1].taken.name if facts else data["subject"]
        done = len(facts) == len(steps) or name == UNKNOWN
        if done or (facts and mistakes[1] < self._noise.early_answer):
            relation = None
        else:
            relation = self._relations[data["relations"][len(facts)]]
            if mistakes[2] < self._noise.wrong_keyword:
                relation = self._rng.choice([other for other in self._relations.values() if other != relation])
        notes = Notes(data["subject"], steps, facts, name, relation)
        return " ".join([*working(notes, self._verbosity), notes.action])

    def _facts_of(self, observations: Sequence[str], queried: Sequence[str], is_wrong: bool) -> tuple[Fact, ...]:
        """The facts so far. What was taken from all but the last is what was then searched for."""
        facts = []
        for place, observation in enumerate(observations):
            pair = pair_of(observation)
            taken = current(pair)
            other = pair[pair[0] == taken]
            if queried[place] == other.name if place < len(queried) else is_wrong:
                taken = other
            facts.append(Fact(observation, pair, taken))
        return tuple(facts)


def pair_of(observation: str) -> Pair:
    """The entries of a passage; two unknown ones of an observation that is no passage."""
    found = [Entry(int(year), name) for year, name in _ENTRY.findall(observation)]
    if len(found) != 2:
        return Entry(0, UNKNOWN), Entry(0, UNKNOWN)
    return found[0], found[1]


POLICY = PolicyConfig(96, 2, 4)
"""0.28 M parameters: two wide layers take less time than four narrow ones."""
TRAJECTORIES, STEPS = 6000, 800
"""To imitate, and of imitation. 800 steps of one seed each gave a greedy EM of .84 in turns of 4 tokens, and of 1.0 in
turns of 10 and 40. In turns of 80, they taught two of three seeds every decision; longer turns take twice as many."""


@dataclass(frozen=True)
class WorkingWorld(SearchWorld):
    """A dated world to train in, another to be judged in, and a policy that practised in eight more."""

    verbosity: int
    """About how many tokens a turn has, one of `VERBOSITIES`."""

    title = "Working"
    description = "every fact has changed once"
    engine = EngineOptions(rejoin_after=0)  # searches take no time

    @property
    def limits(self) -> RolloutLimits:  # type: ignore[override]
        """One spare search, and room for turns that ramble."""
        return RolloutLimits(
            max_turns=HOPS + 1,
            max_turn_tokens=16 + self.verbosity * HOPS // 2,
            max_observation_tokens=24,
            max_trajectory_tokens=(HOPS + 2) * (16 + self.verbosity * 11 // 10),
            top_k=1,
        )

    @property
    def warm_start(self) -> WarmStartConfig:
        return WarmStartConfig(
            policy=POLICY,
            expert=partial(Clerk, self.verbosity),
            noise=WorkingNoise(),
            words=" ".join((*words(), *[RECITAL] * (self.verbosity == 200))),
            limits=self.limits,
            trajectories=TRAJECTORIES,
            steps=STEPS if self.verbosity < 80 else 2 * STEPS,
            # A step reads about as many tokens whatever their turns are; short ones say little of each decision.
            batch_size=min(32, max(8, 320 // self.verbosity)),
        )

    @property
    def name(self) -> str:
        made = f"{HOPS}-hops-{POLICY.hidden_size}x{POLICY.layers}"
        return f"working-{self.verbosity}-tokens-{made}-for-{SEEDS_PER_POLICY}-by-{EVALUATION_QUESTIONS}"

    @property
    def settings(self) -> tuple[object, ...]:
        return HOPS, self.limits, self.warm_start, SEEDS_PER_POLICY, EVALUATION_QUESTIONS

    def build(self, seed: int, target: Path, cache: Path) -> Path:
        self.write({name: build_dated(1000 * seed + i) for i, name in enumerate(("train", "unseen"))}, target)
        number = (seed - 1) // SEEDS_PER_POLICY
        # Far from the seeds of the worlds above, whatever seeds share the policy.
        practice = [build_dated(-1000 * number - i - 1) for i in range(PRACTICE_WORLDS)]
        return warm_start(practice[0], practice, cache, replace(self.warm_start, seed=number))
