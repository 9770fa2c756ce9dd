"""A scripted expert that thinks in writing before it acts: the same decisions in few words or in many."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from examples.quickstart import ExpertNoise, ScriptedExpert
from examples.quickstart.expert import UNKNOWN, observations_in
from examples.quickstart.world import Relation

from benchmarks.worlds.dated import DATED_RELATIONS, YEARS, Entry, Pair, current
from sorl_trl.qa import Question

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

        The word is the decision, and says where to copy the name from: at one of two distances. A policy of two
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
    def count(self) -> str:
        left = len(self.steps) - len(self.facts) if self.relation else 0
        return f"{len(self.facts)} of {len(self.steps)} found , {left} left ."

    @property
    def left(self) -> str:
        """The steps that are left, or that none is."""
        rest = self.steps[len(self.facts) :] if self.relation else ()
        return f"left {' , '.join(map(_step, rest)) or 'nothing'} ."

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


def _choosing(notes: Notes) -> list[str]:
    """Which entry is taken, and no more."""
    return [fact.choice.split()[0] for fact in notes.facts[-1:]]


def _concluding(notes: Notes) -> list[str]:
    return [notes.conclusion]


def _recalling(notes: Notes) -> list[str]:
    last = [notes.facts[-1].comparison] if notes.facts else []
    return [notes.asked, *last, notes.count, notes.left, notes.conclusion]


def _recording(notes: Notes) -> list[str]:
    """The plan, the whole of the last fact, and everything that is left.

    Earlier facts would have to be copied from where they stand in turns before: two layers take long to learn that.
    """
    last = [notes.facts[-1].record] if notes.facts else []
    return [notes.asked, notes.plan, *last, notes.count, notes.left, notes.conclusion]


VERBOSITIES: dict[int, Callable[[Notes], list[str]]] = {
    4: _choosing,
    10: _concluding,
    40: _recalling,
    80: _recording,
}
"""About how many tokens a turn has, to what is written before its action."""


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
        if verbosity not in VERBOSITIES:
            raise ValueError(f"verbosity={verbosity} must be one of {list(VERBOSITIES)}")
        super().__init__(*args)  # type: ignore[arg-type]
        self._working = VERBOSITIES[verbosity]

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
        return " ".join([*self._working(notes), notes.action])

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
