"""The rollout of a trainer that samples the next batches while it trains on this one."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from accelerate.utils import gather_object

from sorl_trl.rollout import Engine, TurnEnd
from sorl_trl.rollout.engine import draw_seed
from sorl_trl.trainers.agents.agent_rollout import AgentRollout
from sorl_trl.trainers.ahead.look_ahead import cycle_steps, upcoming_batches
from sorl_trl.trainers.ahead.policies import policy_ahead

_LISTEN_S = 0.5
"""How often the training thread hears of Ctrl-C while it waits."""
_JOIN_S = 1.0
"""How long a thread may take for the step that it is in, when a run ends."""


class RunEnded(RuntimeError):
    """A rollout under way is no longer wanted."""


@dataclass
class Begun:
    """A rollout that goes on in a thread of its own."""

    batch: int
    version: int
    """How many batches had been trained on when it began."""
    prompts: list[Any]
    engine: Engine
    metrics: list[tuple[str, float]] = field(default_factory=list)
    output: Future[dict[str, Any]] = field(default_factory=Future)
    thread: threading.Thread | None = None


class RolloutsAhead:
    """A `rollout_func` that has the batches of this process sampled ahead, and hands them out in their order.

    Batch b begins once b - `staleness` batches have been trained on and the policy that samples has their weights. So
    no turn is more than `staleness` versions old when its batch is trained on, and nothing is dropped. Whatever
    touches random numbers, other processes, or metrics happens in the training thread: when a batch begins, and when
    it is taken.

    Args:
        trainer: Trains on one batch after the other.
        rollout: How a batch is sampled.
        staleness: How many batches may be ahead.
    """

    def __init__(self, trainer: Any, rollout: AgentRollout, staleness: int) -> None:
        self._trainer, self._rollout, self._staleness = trainer, rollout, staleness
        self._policy = policy_ahead(trainer)
        steps = trainer.args.gradient_accumulation_steps
        self._taken = trainer.state.global_step * steps // cycle_steps(trainer)
        self._last = math.ceil(trainer.state.max_steps * steps / cycle_steps(trainer))
        self._upcoming = enumerate(upcoming_batches(trainer, self._taken), start=self._taken)
        self._begun: deque[Begun] = deque()
        self._ended = threading.Event()

    def take(self, prompts: list[Any]) -> dict[str, Any]:
        """What was sampled for the next batch, whose prompts these are; the weights have just been synchronized.

        Raises RuntimeError for what a rollout under way has raised, on all processes, and for a batch that is not the
        one that was looked ahead to.
        """
        self._trainer.accelerator.wait_for_everyone()  # no process counts on weights that are still under way
        self._policy.begin(self._taken, self._trainer._tokenize_prompts(prompts[:1])[0][0])
        self._begin_next()
        begun = self._begun[0]
        if begun.prompts != prompts:
            raise RuntimeError(
                f"`async_staleness` is {self._staleness}, but batch {begun.batch} of the dataloader is not what its "
                "sampler has shown: rollouts cannot be sampled ahead of a dataloader that changes or skips rows."
            )
        waited = self._wait_for(begun)
        self._begun.popleft()
        self._policy.finish(begun.engine)
        output = begun.output.result()
        self._log(begun, output, waited)
        self._taken += 1
        return output

    def close(self) -> None:
        """Give up what is under way. Threads that wait for a tool end when it answers, and nobody hears it."""
        self._ended.set()
        self._policy.close()
        for begun in self._begun:
            begun.engine.wake()
        until = time.monotonic() + _JOIN_S
        for begun in self._begun:
            assert begun.thread is not None
            begun.thread.join(max(until - time.monotonic(), 0.0))

    def _begin_next(self) -> None:
        """Begin the batches that may: up to `staleness` ahead, and none that the run does not come to."""
        under_way = self._taken + len(self._begun)
        until = min(self._taken + self._staleness + 1, self._last)
        for batch, rows in islice(self._upcoming, max(until - under_way, 0)):
            self._begin(batch, rows)

    def _begin(self, batch: int, rows: list[dict[str, Any]]) -> None:
        trainer = self._trainer
        view = copy.copy(trainer)  # in its thread it is only read
        view.processing_class = copy.deepcopy(trainer.processing_class)  # one cannot serve two threads
        view._tokenizer = getattr(view.processing_class, "tokenizer", view.processing_class)
        end = TurnEnd(view._tokenizer, self._rollout.protocol.stop_strings, trainer.eos_token_ids)
        engine = _stoppable(self._policy.engine(end, self._rollout.engine), self._ended)
        engine.seed = draw_seed()
        begun = Begun(batch, self._taken, [row["prompt"] for row in rows], engine)
        view.rollout_examples, view.engine_ahead = rows, engine
        view._log_metric = lambda name, value: begun.metrics.append((name, value))
        begun.thread = threading.Thread(target=self._collect, args=(begun, view), name=f"sorl-{batch}", daemon=True)
        self._begun.append(begun)
        begun.thread.start()

    def _collect(self, begun: Begun, view: Any) -> None:
        try:
            with torch.no_grad():  # which is each thread's own
                begun.output.set_result(self._rollout(copy.deepcopy(begun.prompts), view))
        except BaseException as error:  # whatever it is, the training thread raises it
            begun.output.set_exception(error)

    def _wait_for(self, begun: Begun) -> float:
        """Wait for a rollout, on all processes; the seconds that it took. Raises what one of them has raised."""
        began = time.perf_counter()
        while not begun.output.done():
            wait([begun.output], timeout=_LISTEN_S)
        waited = time.perf_counter() - began
        error = begun.output.exception()
        failures = [each for each in gather_object([None if error is None else repr(error)]) if each is not None]
        if error is not None:
            raise error
        if failures:
            raise RuntimeError(f"the rollout of another process failed: {failures[0]}")
        return waited

    def _log(self, begun: Begun, output: dict[str, Any], waited: float) -> None:
        turns = [turn for trajectory in output["trajectory"] for turn in trajectory.turns]
        versions = [turn.versions or (begun.version, begun.version) for turn in turns]
        ages = [self._taken - asked for asked, _ in versions]
        changed = [asked != answered for asked, answered in versions]
        own = {"age_mean": sum(ages) / max(len(ages), 1), "age_max": max(ages, default=0), "seconds_waiting": waited}
        own["turns_across_versions"] = sum(changed) / max(len(changed), 1)
        for name, value in (*begun.metrics, *((f"async/{name}", value) for name, value in own.items())):
            self._trainer._log_metric(name, float(value))


def _stoppable(engine: Engine, ended: threading.Event) -> Engine:
    """The engine, whose next poll raises once the run has ended."""
    poll = engine.poll

    def guarded() -> Any:
        if ended.is_set():
            raise RunEnded("the run has ended")
        return poll()

    engine.poll = guarded  # type: ignore[method-assign]
    return engine


@contextmanager
def sampling_ahead(trainer: Any, staleness: int) -> Iterator[None]:
    """In a run, its batches are sampled ahead. Evaluation samples as ever, from one version of the weights."""
    sampled_at_once = trainer.rollout_func
    ahead: RolloutsAhead | None = None

    def rollout(prompts: list[Any], of: Any) -> dict[str, Any]:
        nonlocal ahead
        if not trainer.model.training:
            return dict(sampled_at_once(prompts, of))
        ahead = ahead or RolloutsAhead(trainer, sampled_at_once.__wrapped__, staleness)
        return ahead.take(prompts)

    trainer.rollout_func = rollout
    try:
        yield
    finally:
        trainer.rollout_func = sampled_at_once
        if ahead is not None:
            ahead.close()


def use_behaviour_policy(output: dict[str, Any]) -> None:
    """Take what sampled for the old policy: its log-probabilities, where it gives them, and no weight beside them."""
    sampling = output["sampling_per_token_logps"]
    old = output.get("old_per_token_logps", sampling)
    output["old_per_token_logps"] = torch.where(sampling.isnan(), old, sampling)
    output.pop("importance_sampling_ratio", None)
