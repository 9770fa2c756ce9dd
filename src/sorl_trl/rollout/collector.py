"""The rollout loop: generate, parse, search, observe, until every trajectory has ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from sorl_trl.rollout.encoding import ObservationEncoder
from sorl_trl.rollout.generation import Generation, Generator
from sorl_trl.rollout.limits import RolloutLimits
from sorl_trl.rollout.protocol import TagProtocol
from sorl_trl.rollout.retrieval import Retriever, SearchFailure, SearchOutcome
from sorl_trl.rollout.tokens import decode
from sorl_trl.search import RetryPolicy, SearchBackend
from sorl_trl.types import ActionKind, Observation, StopReason, Trajectory, Turn

logger = logging.getLogger(__name__)

# What a rank without live rows generates from: id 0 is in every vocabulary, and the result is thrown away.
_DUMMY_CONTEXT = (0,)


def _this_rank_alone(active: bool) -> bool:
    return active


@dataclass
class _Row:
    """A trajectory in the making."""

    prompt_ids: tuple[int, ...]
    context: list[int]
    """The prompt and all segments so far: what the next turn is generated from."""
    window: int | None
    """Tokens that the policy can read, where there is an end to them."""
    segments: list[Turn | Observation] = field(default_factory=list)
    turns: int = 0
    stop_reason: StopReason | None = None

    def append(self, segment: Turn | Observation) -> None:
        self.segments.append(segment)
        self.context.extend(segment.token_ids)
        self.turns += isinstance(segment, Turn)

    @property
    def last_turn(self) -> Turn:
        """The turn just taken; an observation never ends a row between two steps of the loop."""
        last = self.segments[-1]
        assert isinstance(last, Turn)
        return last

    def room(self, limits: RolloutLimits) -> tuple[int, StopReason]:
        """Tokens that are left to the trajectory, and what ends it there."""
        left = limits.max_trajectory_tokens - (len(self.context) - len(self.prompt_ids))
        if self.window is not None and self.window - len(self.context) < left:
            return self.window - len(self.context), StopReason.CONTEXT_LIMIT
        return left, StopReason.TRAJECTORY_LIMIT

    def finished(self) -> Trajectory:
        assert self.stop_reason is not None
        return Trajectory(self.prompt_ids, tuple(self.segments), self.stop_reason)


class Collector:
    """Has a policy and a search engine take turns, on many trajectories at a time.

    All rows advance in lock-step: one generation call for all that are live, then one search for all distinct
    queries. A row may take `max_turns` turns that search or go wrong, then one last turn in which it can only answer.
    A turn that reaches a token limit ends the row for that limit's reason, the last turn too. So does the end of the
    generator's window, where it has one.

    Raises ValueError if the tokenizer cannot write the protocol, or the limits leave no room for an observation or,
    where a long one ends a trajectory, for the protocol's own messages.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        search: SearchBackend,
        protocol: TagProtocol | None = None,
        limits: RolloutLimits | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self.protocol = protocol or TagProtocol()
        self.limits = limits or RolloutLimits()
        self.protocol.check(tokenizer)
        self._tokenizer = tokenizer
        self._encoder = ObservationEncoder(tokenizer, self.protocol, self.limits.max_observation_tokens)
        if self.limits.on_long_observation == "stop":
            # Cut, the corrective message would end the trajectory that it is there to save.
            self._encoder.check_messages_fit()
        self._retriever = Retriever(search, self.limits.top_k, retry or RetryPolicy())

    def collect(
        self,
        prompts: Sequence[Sequence[int]],
        generator: Generator,
        any_active: Callable[[bool], bool] = _this_rank_alone,
    ) -> list[Trajectory]:
        """Collect one trajectory per prompt, in order; each has at least one turn and ends with one.

        The exception is a prompt that alone fills the generator's window: its trajectory has no turn, it ends with
        `StopReason.CONTEXT_LIMIT`, and a warning says how long the prompt is.

        Args:
            prompts: Token ids; none may be empty.
            generator: Samples from the policy.
            any_active: Whether any rank still has live rows, given whether this one has. Where parameters are sharded
                over ranks, all must make the same number of generation calls: pass an all-reduce, and a rank whose
                rows have all ended generates one token for a dummy row and throws it away. By default each rank
                stops by itself.

        Raises:
            ValueError: A prompt is empty.
            RuntimeError: The generator or the search engine breaks its contract.
        """
        for i, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(f"prompts[{i}] is empty: it must hold at least one token")
        window: int | None = getattr(generator, "window", None)
        rows = [_Row(tuple(prompt), list(prompt), window) for prompt in prompts]
        self._end_overlong(rows)
        live = [row for row in rows if row.stop_reason is None]
        while any_active(bool(live)):
            self._advance(live, generator)
            live = [row for row in live if row.stop_reason is None]
        return [row.finished() for row in rows]

    def _end_overlong(self, rows: Sequence[_Row]) -> None:
        """End the rows whose prompt leaves no room for a token."""
        overlong = [row for row in rows if row.room(self.limits)[0] < 1]
        for row in overlong:
            row.stop_reason = StopReason.CONTEXT_LIMIT
        if overlong:
            longest = max(len(row.prompt_ids) for row in overlong)
            logger.warning(
                "%d of %d prompts are too long for the policy: the longest has %d tokens, and %d are read with what "
                "follows. Their trajectories have no turn. Shorten them, or raise `vllm_max_model_length` with vLLM.",
                *(len(overlong), len(rows), longest, overlong[0].window),
            )

    def _advance(self, live: list[_Row], generator: Generator) -> None:
        """One turn for every live row, and what the environment has to say to those that go on."""
        for row, generation in zip(live, self._generate(live, generator), strict=True):
            self._take_turn(row, generation)
        waiting = [row for row in live if row.stop_reason is None]
        actions = [row.last_turn.action for row in waiting]
        outcomes = self._retriever.search([a.content for a in actions if a.kind is ActionKind.SEARCH])
        for row in waiting:
            self._observe(row, outcomes)

    def _generate(self, live: list[_Row], generator: Generator) -> list[Generation]:
        if not live:
            generator.generate([_DUMMY_CONTEXT], [1])
            return []
        budgets = [min(self.limits.max_turn_tokens, row.room(self.limits)[0]) for row in live]
        generations = generator.generate([tuple(row.context) for row in live], budgets)
        _check_generations(generations, budgets)
        return generations

    def _take_turn(self, row: _Row, generation: Generation) -> None:
        """Append what was sampled; set the stop reason if the row ends here."""
        text = decode(self._tokenizer, generation.token_ids)
        action = self.protocol.parse(text)
        room, reason = row.room(self.limits)
        row.append(Turn(generation.token_ids, text, action, generation.logprobs))
        if action.kind is ActionKind.ANSWER:
            row.stop_reason = StopReason.ANSWERED
        elif action.kind is ActionKind.INVALID and not generation.stopped:
            row.stop_reason = reason if room < self.limits.max_turn_tokens else StopReason.TURN_LIMIT
        elif row.turns > self.limits.max_turns:
            row.stop_reason = StopReason.MAX_TURNS

    def _observe(self, row: _Row, outcomes: dict[str, SearchOutcome]) -> None:
        """Append the answer to the row's last action, or end the row if it cannot be given."""
        observation = self._observation(row.last_turn, outcomes)
        room, reason = row.room(self.limits)
        if observation is None:
            row.stop_reason = StopReason.SEARCH_UNAVAILABLE
        elif observation.truncated and self.limits.on_long_observation == "stop":
            row.stop_reason = StopReason.OBSERVATION_LIMIT
        elif len(observation.token_ids) >= room:  # not a single token of the next turn would fit behind it
            row.stop_reason = reason
        else:
            row.append(observation)

    def _observation(self, turn: Turn, outcomes: dict[str, SearchOutcome]) -> Observation | None:
        """None if the search engine is down."""
        if turn.action.kind is ActionKind.INVALID:
            # A turn stops at a closing tag or at an end-of-sequence token: without the one, it was the other.
            closed_a_tag = any(stop in turn.text for stop in self.protocol.stop_strings)
            return self._encoder.invalid_feedback(message_closed=not closed_a_tag)
        outcome = outcomes[turn.action.content]
        if outcome is SearchFailure.UNAVAILABLE:
            return None
        if outcome is SearchFailure.REFUSED:
            return self._encoder.search_failed()
        return self._encoder.passages(outcome)


def _check_generations(generations: Sequence[Generation], budgets: Sequence[int]) -> None:
    """Raise RuntimeError unless there is one generation per row, each within its budget."""
    if len(generations) != len(budgets):
        raise RuntimeError(f"the generator returned {len(generations)} generations for {len(budgets)} contexts")
    for row, (generation, budget) in enumerate(zip(generations, budgets, strict=True)):
        size = len(generation.token_ids)
        if not 1 <= size <= budget:
            raise RuntimeError(f"generation {row} has {size} tokens: it must have 1 to {budget}")
        if generation.logprobs is not None and len(generation.logprobs) != size:
            raise RuntimeError(f"generation {row} has {len(generation.logprobs)} logprobs for {size} tokens")
