"""Scripted policies that know how to search, with as many mistakes as wanted."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from sorl_trl.qa import Question
from sorl_trl.rollout import PROTOCOLS, Generation, RolloutLimits

from .world import Relation

PROMPT_TEMPLATE = "question : {question}"
PROTOCOL = PROTOCOLS["terse"]
"""Terse, because a tiny policy copies best from short observations: a second passage, or "Doc 1:" before the first,
makes copying much harder to learn."""
LIMITS = RolloutLimits(max_turns=3, max_turn_tokens=16, max_observation_tokens=24, max_trajectory_tokens=112, top_k=1)
"""Room for two hops, one spare search, and the longest names."""
THINKING_LIMITS = replace(LIMITS, max_turn_tokens=32, max_trajectory_tokens=200)
"""Room for as many searches, with a thought before each action."""
PLAIN_TEMPLATE = (
    "Answer the question. To look a fact up, write <search> words </search>. "
    "To answer, write <answer> answer </answer>.\nQuestion: {question}"
)
PLAIN_LIMITS = RolloutLimits(
    max_turns=3, max_turn_tokens=32, max_observation_tokens=40, max_trajectory_tokens=160, top_k=1
)
"""Limits for a language model, whose tokenizer splits names into pieces."""
UNKNOWN = "unknown"
"""The expert's answer after an observation that states no fact."""

_INFORMATION = re.compile(r"<information>(.*?)</information>")


@dataclass(frozen=True)
class ExpertNoise:
    """The probabilities of the expert's mistakes, each in [0, 1].

    The defaults (ours) warm-start a policy that is right about three times in ten when sampled. It can improve,
    because the right action is still the likeliest.
    """

    missing_keyword: float = 0.25
    """How often it searches for the bare name."""
    wrong_keyword: float = 0.25
    """How often it searches with the keyword of another relation."""
    half_name: float = 0.2
    """How often it searches for a single word of a longer name."""
    early_answer: float = 0.2
    """How often, at each hop, it answers with the name at hand instead of searching."""


NO_NOISE = ExpertNoise(0.0, 0.0, 0.0, 0.0)
HASTY_NOISE = ExpertNoise(missing_keyword=0.05, wrong_keyword=0.05, half_name=0.0, early_answer=0.6)
"""For a `Hasty` expert, whose `early_answer` is how often it believes, after any search but the last, that it is done.
Ours: it warm-starts a policy that, whatever the question, is likelier to answer after its first search than to go on.
When sampled, it sometimes goes on, which a reward can reinforce."""
SURE_NOISE = ExpertNoise(0.0, 0.0, 0.0, early_answer=0.6)
"""`HASTY_NOISE` without the other mistakes, of which 200 examples would teach a language model too much."""


class ScriptedExpert:
    """A `Generator` that follows a script, so that the ordinary collector collects its trajectories like a policy's.

    It follows a question's relations one search at a time, believes every passage it gets, and answers with the object
    of the last one. It reads where it stands from the context.

    Args:
        tokenizer: Encodes its turns and decodes its contexts.
        relations: The relations of the world.
        prompts: Every prompt that it may be given, as token ids -> its question, with the metadata of a `World`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        relations: Sequence[Relation],
        prompts: Mapping[tuple[int, ...], Question],
        noise: ExpertNoise,
        seed: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._relations = {relation.name: relation for relation in relations}
        self._sentences = [(relation, _sentence_pattern(relation)) for relation in relations]
        self._noise = noise
        self._rng = random.Random(f"expert/{seed}")
        self._prompts = prompts
        self._lengths = sorted({len(prompt) for prompt in prompts}, reverse=True)

    def generate(self, contexts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> list[Generation]:
        """See `Generator`. Raises ValueError for a context that begins with none of the prompts."""
        turns = [self._turn(*self._read(context)) for context in contexts]
        encoded = self._tokenizer(turns, add_special_tokens=False)["input_ids"]
        return [
            Generation(tuple(ids[:limit]), None, stopped=len(ids) <= limit)
            for ids, limit in zip(encoded, max_new_tokens, strict=True)
        ]

    def _read(self, context: Sequence[int]) -> tuple[Question, str]:
        """Split a context into the question of its prompt and the text after the prompt."""
        starts = (tuple(context[:length]) for length in self._lengths)
        prompt = next((start for start in starts if start in self._prompts), None)
        if prompt is None:
            text = self._tokenizer.decode(list(context))
            raise ValueError(f"context starts with {text!r}, which is none of the {len(self._prompts)} prompts")
        return self._prompts[prompt], str(self._tokenizer.decode(list(context[len(prompt) :])))

    def _turn(self, question: Question, text: str) -> str:
        """Write the next turn after `text`, which follows the prompt."""
        observations = observations_in(text)
        name = self._found(observations[-1])[1] if observations else question.metadata["subject"]
        relations = question.metadata["relations"]
        if len(observations) == len(relations) or name == UNKNOWN or self._stops_early(observations):
            return f"<answer> {name} </answer>"
        query, _ = self._query(name, self._relations[relations[len(observations)]])
        return f"<search> {query} </search>"

    def _stops_early(self, observations: Sequence[str]) -> bool:
        return self._rng.random() < self._noise.early_answer

    def _query(self, name: str, relation: Relation) -> tuple[str, Relation]:
        """Choose what to search for, and say which relation that asks about."""
        words = name.split()
        if len(words) > 1 and self._rng.random() < self._noise.half_name:
            words = [self._rng.choice(words)]
        chance = self._rng.random()
        if chance < self._noise.missing_keyword:
            return " ".join(words), relation
        if chance < self._noise.missing_keyword + self._noise.wrong_keyword:
            relation = self._rng.choice([other for other in self._relations.values() if other != relation])
        return " ".join([*words, relation.keyword]), relation

    def _found(self, observation: str) -> tuple[Relation | None, str]:
        """The relation that an observation states, and its object; None and `UNKNOWN` if it states no fact."""
        matches = ((relation, sentence.fullmatch(observation)) for relation, sentence in self._sentences)
        return next(((relation, match["object"]) for relation, match in matches if match), (None, UNKNOWN))


class Hasty(ScriptedExpert):
    """A `ScriptedExpert` that always searches once, and often believes that this was enough."""

    def _stops_early(self, observations: Sequence[str]) -> bool:
        return bool(observations) and super()._stops_early(observations)


class Thinker(Hasty):
    """A `Hasty` expert that begins each turn with a thought, from which its action follows.

    `<think> i need the country </think> <search> lyon lies </search>`, then
    `<think> this is the country , now the money </think> <search> france pays </search>`, and last
    `<think> this is the money , done </think> <answer> eur </answer>`. It answers early by thinking "done" early. Only
    actions contain names: a tiny policy that writes each name twice slips twice as often.
    """

    def _turn(self, question: Question, text: str) -> str:
        observations = observations_in(text)
        hops = question.metadata["relations"]
        if not observations:
            return self._search("i need", hops[0], question.metadata["subject"])
        found, name = self._found(observations[-1])
        seen = f"this is the {found.noun}" if found else "this is nothing"
        if len(observations) == len(hops) or found is None or self._stops_early(observations):
            return f"<think> {seen} , done </think> <answer> {name} </answer>"
        return self._search(f"{seen} , now", hops[len(observations)], name)

    def _search(self, thought: str, relation: str, name: str) -> str:
        query, meant = self._query(name, self._relations[relation])
        return f"<think> {thought} the {meant.noun} </think> <search> {query} </search>"


def observations_in(text: str) -> list[str]:
    """The observations in a text, without their tags."""
    return [found.strip() for found in _INFORMATION.findall(text)]


def _sentence_pattern(relation: Relation) -> re.Pattern[str]:
    before, between, after = re.split(r"\{subject\}|\{object\}", relation.sentence)
    return re.compile(f"{re.escape(before)}.+{re.escape(between)}(?P<object>.+){re.escape(after)}")
