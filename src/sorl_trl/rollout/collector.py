"""The rollout loop: rows generate, get replies, and generate again, without waiting for each other."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from sorl_trl.checks import COUNT
from sorl_trl.rollout.engines.base import Engine, Generation, check_generation
from sorl_trl.rollout.engines.lockstep import Generator, LockStepEngine
from sorl_trl.rollout.environment import Reply, Responder, RowTurn
from sorl_trl.rollout.observation import ObservationEncoder
from sorl_trl.rollout.options import EngineOptions, RolloutLimits
from sorl_trl.rollout.protocol import TagProtocol
from sorl_trl.rollout.search_responder import SearchResponder
from sorl_trl.rollout.trajectories import decode, new_routes
from sorl_trl.search import SearchBackend
from sorl_trl.types import Action, ActionKind, Observation, StopReason, Trajectory, Turn

logger = logging.getLogger(__name__)


class Collector:
    """Runs many trajectories at a time, in which a policy and its environment take turns.

    A turn is answered as soon as it ends, while other rows continue generating. Its row continues exactly
    `rejoin_after` engine polls later, even if the reply came sooner or must be waited for; if no row is generating,
    the next row continues at once. Samples therefore do not depend on how long replies take, not even through
    rounding. Two kinds of engine differ: one that generates whole turns (any `Generator`) waits for all replies before
    it continues, and one that does not count steps (a server) gets each reply as soon as it is available.

    A row may take `max_turns` turns that call a tool or are invalid, followed by one last turn in which it can only
    answer. A turn that reaches a token limit, or the end of the engine's window, ends the row for that reason.

    It needs no trainer. This asks a policy that was trained to search:

    ```python
    tokenizer, policy = AutoTokenizer.from_pretrained("out"), AutoModelForCausalLM.from_pretrained("out")
    collector = Collector(tokenizer, BM25Index.open("corpus.jsonl", "index"), limits=RolloutLimits(max_turns=4))
    end = TurnEnd(tokenizer, collector.protocol.stop_strings, [tokenizer.eos_token_id])
    engine = model_engine(policy, end, GenerationConfig())  # greedy
    (row,) = build_prompt_rows([Question("1", "Who wrote Solaris?", ("Lem",))])
    (trajectory,) = collector.collect([tokenizer(row["prompt"])["input_ids"]], engine)
    print(trajectory.answer, [turn.text for turn in trajectory.turns])
    ```

    Args:
        environment: Answers the turns that call a tool. A search engine is wrapped in a `SearchResponder`.
        protocol: How text becomes an action, and a reply becomes an observation.
        rejoin_after: See above. With 0, each poll waits for the replies to all turns that it ended.

    Raises ValueError if the tokenizer cannot write the protocol, the limits leave no room for an observation, or
    `rejoin_after` is below 0.
    """

    time: dict[str, float]
    """How the last rollout spent its time, as logged under `rollout/`. Unset before it."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        environment: SearchBackend | Responder,
        protocol: TagProtocol | None = None,
        limits: RolloutLimits | None = None,
        rejoin_after: int = EngineOptions.rejoin_after,
    ) -> None:
        COUNT.check("rejoin_after", rejoin_after)
        self.protocol = protocol or TagProtocol()
        self.limits = limits or RolloutLimits()
        self.rejoin_after = rejoin_after
        self.protocol.check(tokenizer)
        self.tokenizer = tokenizer
        self.encoder = ObservationEncoder(tokenizer, self.protocol, self.limits.max_observation_tokens)
        if not isinstance(environment, Responder):
            environment = SearchResponder(environment, self.protocol, self.limits.top_k)
        if self.limits.top_k not in (RolloutLimits.top_k, getattr(environment, "top_k", None)):
            raise ValueError(
                f"`limits.top_k` is {self.limits.top_k}, but applies to search engines, and a "
                f"{type(environment).__name__} sets the number of passages itself."
            )
        self.responder = environment

    def collect(
        self,
        prompts: Sequence[Sequence[int]],
        generator: Generator | Engine,
        any_active: Callable[[bool], bool] = bool,
        examples: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Trajectory]:
        """Collect one trajectory per prompt, in order; each has at least one turn and ends with a turn.

        If a prompt alone fills the engine's window, its trajectory has no turn and ends with
        `StopReason.CONTEXT_LIMIT`, and a warning gives the length of the prompt. If memory for keys and values is the
        tighter limit, it determines the window.

        Args:
            prompts: Token ids; no prompt may be empty.
            generator: Samples from the policy: an engine, or a `Generator`, which advances all rows in lock-step.
            any_active: Tells whether any rank still has live rows, given whether this one has. If parameters are
                sharded over ranks, all must poll equally often. In that case, pass an all-reduce: a rank without live
                rows keeps polling, and a generator generates one token for a dummy row. By default, each rank stops by
                itself.
            examples: The dataset columns of each row, for environments that need them. Default: none.

        Raises:
            ValueError: A prompt is empty.
            RuntimeError: The engine loses a turn, or returns no tokens, too many, or misaligned log-probabilities.
        """
        if not all(map(len, prompts)):
            empty = [i for i, prompt in enumerate(prompts) if not len(prompt)]
            raise ValueError(f"`prompts` {empty} are empty, but each must hold at least one token.")
        examples = [{}] * len(prompts) if examples is None else examples
        # A generator that may be sharded is called equally often by all ranks.
        engine = generator if isinstance(generator, Engine) else LockStepEngine(generator, polls_together=True)
        began = time.perf_counter()
        try:
            engine.open(len(prompts))
            rows = [_Row(i, tuple(prompt), self.limits, engine.window) for i, prompt in enumerate(prompts)]
            _end_overlong(rows)
            self.responder.open(examples)
            rollout = _Rollout(self, engine, rows)
            rollout.run(any_active)
        finally:
            with closing(engine):  # even if closing the environment raises
                self.responder.close()
        self.time = rollout.time_spent(time.perf_counter() - began)
        return [row.finished() for row in rows]


class _Waiting(NamedTuple):
    """A row that waits for its reply."""

    due: int
    """The poll after which the reply rejoins."""
    row: _Row
    reply: Future[Reply]


class _Rollout:
    def __init__(self, collector: Collector, engine: Engine, rows: Sequence[_Row]) -> None:
        self._collector = collector
        self._engine = engine
        self._rows = rows
        self._generating: dict[int, int] = {}
        """The token budgets of the turns in progress, by row."""
        self._polls = 0
        self._waiting: list[_Waiting] = []
        """In the order of their turns."""
        self._rejoin_after = 0 if engine.in_turns else collector.rejoin_after
        self._seconds_generating = self._seconds_waiting = 0.0

    def run(self, any_active: Callable[[bool], bool]) -> None:
        """Alternate one call of `any_active` and one poll, as every rank does."""
        for row in self._rows:
            if row.stop_reason is None:
                self._submit(row)
        while any_active(any(row.stop_reason is None for row in self._rows)):
            began = time.perf_counter()
            ended = self._engine.poll()
            self._seconds_generating += time.perf_counter() - began
            self._take_turns(ended)
            if self._engine.in_steps:
                self._rejoin()
            else:
                self._rejoin_early()
            if self._generating and self._engine.idle:
                raise RuntimeError(f"the engine is idle, but has not returned the turns of rows {[*self._generating]}")

    def time_spent(self, seconds: float) -> dict[str, float]:
        """Seconds spent polling the engine and waiting for replies, and tokens per second."""
        sampled = sum(len(each.token_ids) for row in self._rows for each in row.segments if isinstance(each, Turn))
        return {
            "seconds_generating": self._seconds_generating,
            "seconds_waiting": self._seconds_waiting,
            "tokens_per_second": sampled / seconds,
        }

    def _submit(self, row: _Row) -> None:
        self._generating[row.index] = row.budget
        engine = self._engine.of_agent(self._collector.responder.agent_of(row.index))
        engine.submit(row.index, row.context, row.budget)

    def _wait(self, rows: Sequence[_Waiting], until: str) -> None:
        began = time.perf_counter()
        wait({each.reply for each in rows}, return_when=until)
        self._seconds_waiting += time.perf_counter() - began

    def _take_turns(self, ended: Sequence[tuple[int, Generation]]) -> None:
        self._polls += 1
        asking: list[_Row] = []
        for index, generation in sorted(ended, key=lambda each: each[0]):
            check_generation(index, generation, self._generating.pop(index))
            row = self._rows[index]
            text = decode(self._collector.tokenizer, generation.token_ids)
            responder = self._collector.responder
            action = responder.protocol_of(index, self._collector.protocol).parse(text)
            row.take_turn(generation, text, action, responder.agent_of(index))
            if row.stop_reason is not None:
                self._engine.release(index)
            elif row.last_turn.action.kind is ActionKind.INVALID:
                # The turn stopped at a closing tag or an end-of-sequence token; without the one, at the other.
                closed_a_tag = any(stop in text for stop in self._collector.protocol.stop_strings)
                row.observe(self._collector.encoder.invalid_feedback(message_closed=not closed_a_tag))
                self._go_on(row)
            else:
                asking.append(row)
        self._ask(asking)

    def _ask(self, rows: Sequence[_Row]) -> None:
        if not rows:
            return
        replies = self._collector.responder.ask([RowTurn(row.index, row.last_turn) for row in rows])
        if not self._engine.in_steps:
            for reply in replies:
                reply.add_done_callback(lambda _: self._engine.wake())
        due = self._polls + self._rejoin_after
        self._waiting += [_Waiting(due, row, reply) for row, reply in zip(rows, replies, strict=True)]

    def _rejoin(self) -> None:
        """Process the replies that are due, and wait for those that are late."""
        while self._waiting:
            if self._engine.idle:  # no row is decoding, so nothing can continue until then
                self._polls = max(self._polls, self._waiting[0].due)
            due = [each for each in self._waiting if each.due <= self._polls]
            if not due:
                return
            self._waiting = self._waiting[len(due) :]
            self._wait(due, ALL_COMPLETED)
            for each in due:
                self._take_reply(each.row, each.reply.result())

    def _rejoin_early(self) -> None:
        """Process the replies that have arrived. If no row is generating, wait for one."""
        while self._waiting:
            if self._engine.idle:
                self._wait(self._waiting, FIRST_COMPLETED)
            came = [each for each in self._waiting if each.reply.done()]
            if not came:
                return
            self._waiting = [each for each in self._waiting if each not in came]
            for each in came:
                self._take_reply(each.row, each.reply.result())

    def _take_reply(self, row: _Row, reply: Reply) -> None:
        if reply.reward is not None:
            row.segments[-1] = replace(row.last_turn, reward=float(reply.reward))
        if reply.stop is not None:
            row.stop_reason = reply.stop
        else:
            row.observe(self._collector.encoder.information(reply.text, reply.passages, reply.role, reply.results))
        self._go_on(row)

    def _go_on(self, row: _Row) -> None:
        if row.stop_reason is None:
            self._submit(row)
        else:
            self._engine.release(row.index)


@dataclass(eq=False)
class _Row:
    """What one row of a rollout has read and written so far."""

    index: int
    prompt_ids: tuple[int, ...]
    limits: RolloutLimits
    window: int | None
    """How many tokens the policy can read; None for no limit."""
    context: list[int] = field(init=False)
    """The prompt and all segments so far: the context of the next turn."""
    segments: list[Turn | Observation] = field(default_factory=list)
    turns: int = 0
    stop_reason: StopReason | None = None

    def __post_init__(self) -> None:
        self.context = list(self.prompt_ids)

    @property
    def last_turn(self) -> Turn:
        """The turn just taken, which its reply may follow."""
        last = self.segments[-1]
        assert isinstance(last, Turn)
        return last

    @property
    def budget(self) -> int:
        """How many tokens the next turn may have; below 1 if there is no room for one."""
        return min(self.limits.max_turn_tokens, self._room()[0])

    def take_turn(self, generation: Generation, text: str, action: Action, agent: str) -> None:
        """Append a turn, and set the stop reason if the row ends here."""
        room, reason = self._room()
        sampled = generation.token_ids, text, action, generation.logprobs
        routes = new_routes(generation, (each for each in self.segments if isinstance(each, Turn)))
        self._append(Turn(*sampled, versions=generation.versions, agent=agent, routes=routes))
        self.turns += 1
        if action.kind is ActionKind.ANSWER:
            self.stop_reason = StopReason.ANSWERED
        elif action.kind in (ActionKind.INVALID, ActionKind.MESSAGE) and not generation.stopped:
            self.stop_reason = reason if room < self.limits.max_turn_tokens else StopReason.TURN_LIMIT
        elif self.turns > self.limits.max_turns:
            self.stop_reason = StopReason.MAX_TURNS

    def observe(self, observation: Observation) -> None:
        """Append the reply to the last turn, or end the row if no turn could follow it."""
        room, reason = self._room()
        if len(observation.token_ids) >= room:  # not a single token of the next turn would fit after it
            self.stop_reason = reason
        else:
            self._append(observation)

    def finished(self) -> Trajectory:
        assert self.stop_reason is not None
        return Trajectory(self.prompt_ids, tuple(self.segments), self.stop_reason)

    def _append(self, segment: Turn | Observation) -> None:
        self.segments.append(segment)
        self.context.extend(segment.token_ids)

    def _room(self) -> tuple[int, StopReason]:
        """How many tokens the trajectory has left, and the stop reason when they are used up."""
        most = self.limits.max_trajectory_tokens
        left = (sys.maxsize if most is None else most) - (len(self.context) - len(self.prompt_ids))
        if self.window is not None and self.window - len(self.context) < left:
            return self.window - len(self.context), StopReason.CONTEXT_LIMIT
        return left, StopReason.TRAJECTORY_LIMIT


def _end_overlong(rows: Sequence[_Row]) -> None:
    """End the rows with a prompt that leaves no room for a token."""
    overlong = [row for row in rows if row.budget < 1]
    for row in overlong:
        row.stop_reason = StopReason.CONTEXT_LIMIT
    if overlong:
        longest = max(len(row.prompt_ids) for row in overlong)
        logger.warning(
            "%d of %d prompts are too long: the longest has %d tokens, but prompt and trajectory are limited to %d "
            "(by the model's positions, `kv_cache_gib`, or `vllm_max_model_length`). Their trajectories have no turn.",
            *(len(overlong), len(rows), longest, overlong[0].window),
        )
