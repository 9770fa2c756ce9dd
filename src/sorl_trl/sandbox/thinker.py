"""An expert that thinks in writing before it acts, and often believes too early that it has found everything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

from transformers import PreTrainedTokenizerBase

from sorl_trl.checks import POSITIVE_COUNT, SHARE
from sorl_trl.rollout import Generator, RolloutLimits
from sorl_trl.sandbox import atlas, invented
from sorl_trl.sandbox.expert import ExpertNoise, ScriptedExpert
from sorl_trl.sandbox.imitation import WarmStartConfig
from sorl_trl.sandbox.setting import THINKING_LIMITS
from sorl_trl.sandbox.world import World


@dataclass(frozen=True)
class ThinkingNoise(ExpertNoise):
    """The chances of a thinker's mistakes, each in [0, 1].

    The defaults (ours) warm-start a policy that searches once: after its first search it is likelier to answer than to
    go on, whatever the question asks. Where it is sampled it sometimes goes on, and a reward can find that.
    """

    missing_keyword: Annotated[float, SHARE] = 0.05
    wrong_keyword: Annotated[float, SHARE] = 0.05
    """Of thinking of another relation, and searching by that."""
    half_name: Annotated[float, SHARE] = 0.0
    early_answer: Annotated[float, SHARE] = 0.6
    """Of believing, after each search but the last, that nothing is left to be found."""


class Thinker(ScriptedExpert):
    """A `ScriptedExpert` whose turns begin with a thought from which the action follows.

    `<think> i need the country </think> <search> lyon lies </search>`, then
    `<think> this is the country , now the money </think> <search> france pays </search>`, and last
    `<think> this is the money , done </think> <answer> eur </answer>`. To answer early is to think "done" early. Names
    stand in the action alone: a tiny policy that writes each of them twice makes twice the slips.
    """

    def _turn(self, context: str) -> str:
        question, observations = self._read(context)
        hops = question.metadata["relations"]
        if not observations:
            return self._search("i need", hops[0], question.metadata["subject"])
        found, name = self._found(observations[-1])
        seen = f"this is the {found.noun}" if found else "this is nothing"
        done = len(observations) == len(hops) or found is None
        if done or self._rng.random() < self._noise.early_answer:
            return f"<think> {seen} , done </think> <answer> {name} </answer>"
        return self._search(f"{seen} , now", hops[len(observations)], name)

    def _search(self, thought: str, relation: str, name: str) -> str:
        query, meant = self._query(name, self._relations[relation])
        return f"<think> {thought} the {meant.noun} </think> <search> {query} </search>"


@dataclass(frozen=True)
class ThinkingWarmStart(WarmStartConfig):
    """As `WarmStartConfig`, with a `Thinker` for its expert, room for its thoughts and more steps.

    The quickstart starts from it.
    """

    noise: ThinkingNoise = field(default_factory=ThinkingNoise)
    limits: RolloutLimits = THINKING_LIMITS
    steps: Annotated[int, POSITIVE_COUNT] = 1200
    """Half as many again: where turns are longer, names are copied over a greater distance."""

    def expert(self, tokenizer: PreTrainedTokenizerBase, world: World) -> Generator:
        return Thinker(tokenizer, world.relations, world.train, self.noise, self.seed)

    def texts(self) -> Iterable[str]:
        yield "<think> </think> i need the this is , now done nothing"
        yield from (relation.noun for relation in (*atlas.RELATIONS, *invented.RELATIONS))
