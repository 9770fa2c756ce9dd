"""The rollout loop: rows generate, get replies, and generate again, without waiting for each other."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from sorl_trl.checks import COUNT
from sorl_trl.rollout.engines.base import Engine, Generation, TurnRequest
from sorl_trl.rollout.engines.lockstep import Generator, LockStepEngine
from sorl_trl.rollout.environment import Reply, Responder
from sorl_trl.rollout.observation import ObservationEncoder
from sorl_trl.rollout.options import EngineOptions, RolloutLimits
from sorl_trl.rollout.progress import Progress
from sorl_trl.rollout.protocol import ChatProtocol, TagProtocol
from sorl_trl.rollout.routing import newly_read
from sorl_trl.rollout.search_responder import SearchResponder
from sorl_trl.rollout.trajectories import decode
from sorl_trl.rollout.turns import Episode, Episodes
from sorl_trl.search import SearchBackend
from sorl_trl.types import ActionKind, Observation, StopReason, Trajectory, Turn

logger = logging.getLogger(__name__)


class Collector:
    """Runs many trajectories at a time, in which a policy and its environment take turns.

    A turn is answered as soon as it ends, while other rows continue generating. `Turns` says when its row continues.

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
        rejoin_after: How many polls after its turn a row continues. With 0, each poll waits for the replies to all
            turns that it ended.

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
            ValueError: A prompt is empty, or an environment adds text to prompts, which are already encoded.
            RuntimeError: The engine loses a turn, or returns no tokens, too many, or misaligned log-probabilities.
        """
        with closing(self.responder):
            rows = self.responder.open([{}] * len(prompts) if examples is None else examples)
            if said := next(filter(None, (row.greeting for row in rows)), None):
                raise ValueError(
                    f"`reset` returned {said[:80]!r}, which belongs in the prompt: use an `AgentRollout`, or have "
                    "`reset` return None"
                )
            return self.run(prompts, generator, any_active)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        generator: Generator | Engine,
        any_active: Callable[[bool], bool] = bool,
        progress: Progress | None = None,
    ) -> list[Trajectory]:
        """`collect` with a responder that is open, after whose greetings the prompts were encoded."""
        if empty := [i for i, prompt in enumerate(prompts) if not len(prompt)]:
            raise ValueError(f"`prompts` {empty} are empty, but each must hold at least one token.")
        # A generator that may be sharded is called equally often by all ranks.
        engine = generator if isinstance(generator, Engine) else LockStepEngine(generator, polls_together=True)
        segments: list[list[Turn | Observation]] = [[] for _ in prompts]
        episodes = [self._episode(row, ids, segments[row], engine) for row, ids in enumerate(prompts)]
        turns = Episodes(engine, episodes, self.responder, self.rejoin_after)
        with closing(engine):
            engine.open(len(prompts))
            _warn_of_overlong(prompts, engine.window)
            turns.serve(any_active, progress)
        reasons = [turns.stop_reasons[row] for row in range(len(prompts))]
        self.time = turns.time_spent()
        return [*map(Trajectory, map(tuple, prompts), map(tuple, segments), reasons)]

    def _episode(
        self, row: int, prompt_ids: Sequence[int], segments: list[Turn | Observation], engine: Engine
    ) -> Episode:
        """A trajectory from its prompt to its end: fills `segments`, and returns the stop reason."""
        token_ids, taken, known, told = [*prompt_ids], 0, 0, self.responder.rows[row]
        protocol = self.protocol
        if told.tools is not None and isinstance(protocol, ChatProtocol):  # as TRL types calls: by the row's own tools
            protocol = replace(protocol, functions=told.tools)
        most, full = self._most_tokens(len(prompt_ids), engine.window)
        while (room := most - len(token_ids)) > 0:
            agent = told.agent
            limit = min(self.limits.max_turn_tokens, room)
            generation: Generation = yield TurnRequest(row, token_ids, limit, run=row)
            turn = self._read(generation, protocol, agent, known)
            segments.append(turn)
            token_ids += turn.token_ids
            taken, known = taken + 1, len(token_ids) - 1
            kind = turn.action.kind
            if kind is ActionKind.ANSWER:
                return StopReason.ANSWERED
            if kind in (ActionKind.INVALID, ActionKind.MESSAGE) and not generation.stopped:
                return full if room < self.limits.max_turn_tokens else StopReason.TURN_LIMIT
            if taken > self.limits.max_turns:
                return StopReason.MAX_TURNS
            if kind is ActionKind.INVALID:
                # The turn stopped at a closing tag or an end-of-sequence token; without the one, at the other.
                closed_a_tag = any(stop in turn.text for stop in self.protocol.stop_strings)
                seen = self.encoder.invalid_feedback(message_closed=not closed_a_tag)
            else:
                reply: Reply = yield turn
                if reply.reward is not None:
                    segments[-1] = replace(turn, reward=float(reply.reward))
                if reply.stop is not None:
                    return reply.stop
                seen = self.encoder.reply(reply, turn.token_ids)
            if len(token_ids) + len(seen.token_ids) >= most:  # not a single token of the next turn would fit
                return full
            segments.append(seen)
            token_ids += seen.token_ids
        return full

    def _most_tokens(self, prompt: int, window: int | None) -> tuple[int, StopReason]:
        """How many tokens the policy may read, and the stop reason when they are used up."""
        most = self.limits.max_trajectory_tokens
        allowed = sys.maxsize if most is None else prompt + most
        if window is not None and window < allowed:
            return window, StopReason.CONTEXT_LIMIT
        return allowed, StopReason.TRAJECTORY_LIMIT

    def _read(self, generation: Generation, protocol: TagProtocol, agent: str, known: int) -> Turn:
        text = decode(self.tokenizer, generation.token_ids)
        sampled = generation.token_ids, text, protocol.parse(text), generation.logprobs
        return Turn(*sampled, versions=generation.versions, agent=agent, routes=newly_read(generation.routes, known))


def _warn_of_overlong(prompts: Sequence[Sequence[int]], window: int | None) -> None:
    """Warn of prompts that leave no room for a token."""
    if window is None or not (overlong := sum(len(prompt) >= window for prompt in prompts)):
        return
    logger.warning(
        "%d of %d prompts are too long: the longest has %d tokens, but prompt and trajectory are limited to %d "
        "(by the model's positions, `kv_cache_gib`, or `vllm_max_model_length`). Their trajectories have no turn.",
        *(overlong, len(prompts), max(map(len, prompts)), window),
    )
