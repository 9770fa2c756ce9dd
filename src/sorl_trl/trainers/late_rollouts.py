"""Asynchronous rollouts: they sample the next batches while the trainer trains on one.

See docs/how_to/async.md.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from io import BytesIO
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.serialization import safe_globals

from sorl_trl.rollout import Engine, EngineOptions, TurnEnd, model_engine
from sorl_trl.rollout.chat import RolloutSetup
from sorl_trl.rollout.engines.slots import SlotEngine
from sorl_trl.rollout.policy_rollout import PolicyRollout
from sorl_trl.rollout.progress import RolloutBar
from sorl_trl.rollout.routing import asks_for_routes
from sorl_trl.text import one_line
from sorl_trl.trainers.checkpoint import EpochRepeatSampler
from sorl_trl.trainers.host import Host
from sorl_trl.trainers.vllm_policy import ServerPolicy, raise_on_all_ranks
from sorl_trl.types import (
    Action,
    ActionKind,
    Observation,
    Passage,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

logger = logging.getLogger(__name__)

_STORED: list[Any] = [
    *(Trajectory, Turn, Observation, Action, ActionKind, StopReason, Passage, ToolCall, ToolResult),
    *(np.ndarray, np.dtype, np.dtypes.UInt8DType, np.dtypes.UInt16DType, np.zeros(0).__reduce__()[0]),  # `Turn.routes`
]
"""The types in a rollout's output that a checkpoint may hold, besides tensors and what JSON has."""
_JOIN_S = 1.0
"""How long to wait for threads to finish their current step when a run ends."""


class PolicyCopies:
    """Copies of the policy in this process, one for each version in use, for tests and small models.

    A rollout samples from the weights with which it began. Sampling shares the cores, or the GPU, with training.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._fresh: nn.Module | None = None
        """The copy with the current weights, once a rollout has needed it. Engines hold older copies."""

    def renew(self, version: int) -> None:
        """Drop the copy, because the policy has new weights."""
        self._fresh = None

    def engine(self, end: TurnEnd, options: EngineOptions) -> Engine:
        """Make an engine for a rollout that begins now and samples from the current weights."""
        if self._fresh is None:
            policy = self._host.accelerator.unwrap_model(self._host.model)
            self._fresh = copy.deepcopy(policy).eval().requires_grad_(False)
            for module in self._fresh.modules():
                # TRL's and accelerate's wrappers of `forward` would call the original model.
                module.__dict__.pop("forward", None)
        options = replace(options, rollout_engine="slots")
        engine = model_engine(self._fresh, end, self._host.generation_config, options)
        assert isinstance(engine, SlotEngine)  # "slots" refuses a model that it does not serve
        engine.logprobs_at = self._host.args.temperature  # those that the trainer computes
        return engine

    def close(self) -> None:
        """Do nothing: rollouts end with their next step."""


@dataclass(eq=False)
class Part:
    """Rows of a batch that one thread samples together: the whole batch, or a group."""

    place: tuple[int, int]
    """The number of its batch, and its own number within that batch."""
    version: int
    """How many batches training had taken when it began."""
    step: int
    """How many optimizer steps had been made when it began."""
    rows: list[dict[str, Any]]
    """Rows of the dataset."""
    engine: Engine | None = None
    """None if a checkpoint had its result."""
    thread: threading.Thread = field(init=False, repr=False)
    result: Future[tuple[list[Trajectory], dict[str, float]]] = field(default_factory=Future)
    """What `PolicyRollout.collect` returns or raises."""

    @property
    def prompts(self) -> list[Any]:
        return [row["prompt"] for row in self.rows]


class RolloutsAhead:
    """Samples this process's batches before training needs them, and returns one per call of `next`.

    In a run (`running`), the dataloader only sets the pace: with each of its batches the trainer asks for one rollout.
    The rollouts' rows are read here, each once, in the order of the dataloader's sampler. Batch b begins once the
    sampling policy has the weights after training on b - `staleness` batches.

    In dataset order, call b returns batch b, and no turn is more than `staleness` versions old. In order of
    completion, a call returns the groups that finish first. A slow group is overtaken for at most 2 * `staleness`
    batches, so no turn is more than 3 * `staleness` versions old.

    Everything that involves random numbers, other processes or metrics happens in the training thread, when a part
    begins and when it is taken.

    Args:
        host: Only the training thread reads it.
        rollout: Collects each part in its own thread, with a fork of its responder.
        staleness: How many batches to begin ahead.
        by_completion: Whether to train on groups in order of completion instead of dataset order.
    """

    def __init__(self, host: Host, rollout: PolicyRollout, staleness: int, by_completion: bool = False) -> None:
        self.rollout = rollout
        self._host, self._staleness = host, staleness
        self._grace = 2 * staleness if by_completion else 0
        rows = int(host.args.generation_batch_size) // host.accelerator.num_processes
        self._rows_of_part = int(host.args.num_generations) if by_completion else rows
        self._parts_of_batch = rows // self._rows_of_part
        self._policy: ServerPolicy | PolicyCopies | None = None
        """The policy that this run's rollouts are sampled from; None outside a run."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context in which training takes asynchronous rollouts. When it ends, those in progress are aborted.

        Threads that wait for a tool end when it replies; the reply is ignored.
        """
        setup = self._host.setup
        # The training thread changes how its own processing class pads.
        self._setup = replace(setup, processing_class=copy.deepcopy(setup.processing_class))
        self._policy = ServerPolicy(self._host) if self._host.uses_vllm else PolicyCopies(self._host)
        self._under_way: list[Part] = []
        self._bar = RolloutBar(self._host.args)
        self._ended = threading.Event()
        self._taken = self._begun = self._last = -1
        self._upcoming: Iterator[list[dict[str, Any]]] = iter(())
        self._shown: dict[int, list[Any]] = {}
        """The prompts of the batches that have begun. The dataloader's must agree with them."""
        self._overtaken: set[tuple[int, int]] = set()
        """Parts of the batch taken last and of earlier ones that are still to be trained on."""
        self._overtook: set[tuple[int, int]] = set()
        """Parts of later batches that have been trained on."""
        self._kept: dict[tuple[int, int], Tensor] = {}
        """The parts that a checkpoint holds, as `_packed` writes them."""
        try:
            yield
        finally:
            policy, self._policy = self._policy, None
            self._ended.set()
            self._bar.close()
            policy.close()
            in_threads = [(part.engine, part.thread) for part in self._under_way if part.engine is not None]
            for engine, _ in in_threads:
                engine.wake()
            until = time.monotonic() + _JOIN_S
            for _, thread in in_threads:
                thread.join(max(until - time.monotonic(), 0.0))

    def begin_at(self, micro_batches: int) -> None:
        """Begin a run after this many micro-batches of the dataloader.

        The dataloader repeats a batch for a whole cycle. This run takes its first batch when the current cycle ends.
        """
        host, cycle = self._host, self._host.args.cycle_steps
        self._taken = (micro_batches + -host.cycle[0] % cycle) // cycle
        self._last = math.ceil(host.last_step * host.args.gradient_accumulation_steps / cycle)
        self._begun = min((batch for batch, _ in self._overtaken), default=self._taken)
        self._upcoming = upcoming_batches(host, self._begun)

    def state_dict(self) -> dict[str, Any]:
        """The rollouts in progress, which parts of which batches were trained on out of order, and the settings.

        It waits for rollouts in progress, so that a resumed run continues exactly, but not for a vLLM server, whose
        samples depend on timing.
        """
        if not self._host.uses_vllm:
            wait([part.result for part in self._under_way])
        packed = {part.place: _packed(part) for part in self._under_way}
        kept = {place: part for place, part in packed.items() if part is not None}
        settings = {"parts_of_batch": self._parts_of_batch, "grace": self._grace, "staleness": self._staleness}
        return {**settings, "late": sorted(self._overtaken), "early": sorted(self._overtook), "kept": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the `state_dict` of a run with the same settings. Call it before the run begins."""
        self._overtaken, self._overtook = ({(b, number) for b, number in state[key]} for key in ("late", "early"))
        self._kept = state.get("kept", {})

    @property
    def is_running(self) -> bool:
        """Whether a run takes asynchronous rollouts. Otherwise, and in evaluation, the policy samples at once."""
        return self._policy is not None

    def next(self, prompts: list[Any]) -> tuple[list[dict[str, Any]], list[Trajectory], int]:
        """Rows of the dataset, their trajectories, and the number of optimizer steps made when the oldest began.

        The number is that of all processes, which call it together. `prompts` are those of the dataloader. All
        processes raise the error of a failed rollout, and RuntimeError if these are not the prompts that the
        dataloader's sampler announced.
        """
        assert self._policy is not None
        raise_on_all_ranks(self._host, self._raise_failures)  # before weights are sent, because a server may be gone
        self._policy.renew(self._taken)
        raise_on_all_ranks(self._host, self._begin_next, prompts)
        parts, waited = self._wait_for_parts()
        self._take(parts)
        self._log(parts, waited)
        self._taken += 1
        step = min(gather_object([min(part.step for part in parts)]))
        found = [each for part in parts for each in part.result.result()[0]]
        return [row for part in parts for row in part.rows], found, step

    def _begin_next(self, prompts: list[Any]) -> None:
        """Begin batches up to `staleness` in advance, but none beyond the end of the run."""
        until = max(min(self._taken + self._staleness + 1, self._last), self._taken + 1)
        while self._begun < until:
            rows = next(self._upcoming)
            if self._begun >= self._taken:
                self._shown[self._begun] = [row["prompt"] for row in rows]
            for number in range(self._parts_of_batch):
                place = self._begun, number
                is_left = place in self._overtaken if self._begun < self._taken else place not in self._overtook
                if is_left:
                    self._begin(place, rows[number * self._rows_of_part :][: self._rows_of_part])
            self._begun += 1
        if self._shown.pop(self._taken) != prompts:
            raise RuntimeError(
                f"`async_staleness` is {self._staleness}, but batch {self._taken} of the dataloader is not what its "
                "sampler announced: asynchronous rollouts need a dataloader that neither changes nor skips rows."
            )

    def _begin(self, place: tuple[int, int], rows: list[dict[str, Any]]) -> None:
        """Begin a part, unless a checkpoint had its result."""
        if place in self._kept and (kept := _unpacked(self._kept.pop(place), place, rows)) is not None:
            self._under_way.append(kept)
            return
        assert self._policy is not None
        engine = self._policy.engine(self._end(self._setup), self.rollout.engine)
        engine.seed = engine.rollout_seed()
        if asks_for_routes(self._host.args):
            engine.report_routes()
        part = Part(place, self._taken, self._host.step, rows, engine)
        setup = replace(self._setup, progress=self._bar.begin(len(rows)))
        collect = partial(_collect, part, engine, self.rollout.fork(), setup, self._ended)
        part.thread = threading.Thread(target=collect, name="sorl-ahead-{}.{}".format(*place), daemon=True)
        part.thread.start()
        self._under_way.append(part)

    def _end(self, setup: RolloutSetup) -> TurnEnd:
        return TurnEnd(setup.tokenizer, self.rollout.stop_strings, setup.eos_token_ids)

    def _wait_for_parts(self) -> tuple[list[Part], float]:
        """The parts to train on next, on all processes, and the seconds waited. Raises the error of a failed part."""
        began = time.perf_counter()
        due = [part for part in self._under_way if part.place[0] <= self._taken - self._grace]
        missing = self._parts_of_batch - len(due)
        while True:
            done = [part for part in self._under_way if part.result.done()]
            there = [part for part in done if part not in due][:missing]
            failed = any(part.result.exception() is not None for part in done)
            if failed or (len(there) == missing and all(part in done for part in due)):
                break
            wait([part.result for part in self._under_way if part not in done], return_when=FIRST_COMPLETED)
        waited = time.perf_counter() - began
        raise_on_all_ranks(self._host, self._raise_failures)
        return [*due, *there], waited

    def _raise_failures(self) -> None:
        """Raise the error of a rollout in progress, if one has failed."""
        for part in self._under_way:
            if part.result.done():
                part.result.result()

    def _take(self, parts: list[Part]) -> None:
        for part in parts:
            self._under_way.remove(part)
        self._overtaken -= {part.place for part in parts}
        self._overtaken |= {part.place for part in self._under_way if part.place[0] <= self._taken}
        self._overtook |= {part.place for part in parts}
        self._overtook = {place for place in self._overtook if place[0] > self._taken}

    def _log(self, parts: list[Part], waited: float) -> None:
        trajectories, metrics = zip(*(part.result.result() for part in parts), strict=True)
        ages, changed = [], []
        for part, own in zip(parts, trajectories, strict=True):
            for turn in (turn for each in own for turn in each.turns):
                asked, answered = turn.versions or (part.version, part.version)
                ages.append(self._taken - asked)
                changed.append(asked != answered)
        oldest = max(gather_object([max(ages, default=0)]))
        turns = max(len(ages), 1)
        figures = {"async/age_mean": sum(ages) / turns, "async/turns_across_versions": sum(changed) / turns}
        figures |= {"async/age_max": float(oldest), "async/seconds_waiting": waited}
        for name, value in (item for each in (*metrics, figures) for item in each.items()):
            self._host.record(name, value)


def upcoming_batches(host: Host, first: int) -> Iterator[list[dict[str, Any]]]:
    """This process's rows of the dataset, batch by batch and epoch by epoch, starting at batch `first`.

    A batch is one rollout's rows. The order is that of the trainer's own sampler.
    """
    sampler = EpochRepeatSampler.like(host.sampler())
    sampler.repeat_count = 1
    size = int(host.args.generation_batch_size)
    rows = size // host.accelerator.num_processes
    mine = rows * host.accelerator.process_index
    number = 0
    while True:
        indices = list(sampler)
        for start in range(0, len(indices), size):
            if number >= first:
                yield [dict(host.train_dataset[i]) for i in indices[start + mine : start + mine + rows]]
            number += 1
        sampler.epoch += 1


def _collect(part: Part, engine: Engine, rollout: PolicyRollout, setup: RolloutSetup, ended: threading.Event) -> None:
    """Sample a part, in its thread."""

    def go_on(active: bool) -> bool:
        if ended.is_set():
            raise CancelledError("the run has ended")
        return active

    try:
        with torch.no_grad():  # each thread has its own switch
            prompts = copy.deepcopy(part.prompts)
            part.result.set_result(rollout.collect(setup, prompts, part.rows, engine, go_on))
    except BaseException as error:  # the training thread raises it
        part.result.set_exception(error)


def _packed(part: Part) -> Tensor | None:
    """A finished part, as bytes; None if it failed, is in progress, or holds what a checkpoint cannot.

    For example, a checkpoint cannot hold the environment objects of a `ToolBox`.
    """
    if not part.result.done() or part.result.exception() is not None:
        return None
    buffer = BytesIO()
    try:
        torch.save((part.version, part.step, part.prompts, *part.result.result()), buffer)
        packed = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        _read(packed)
    except Exception as error:  # pickle raises whatever an object does
        _warn_of_what_is_not_kept(one_line(error)[:200])
        return None
    return packed


@cache
def _warn_of_what_is_not_kept(reason: str) -> None:
    logger.warning("Checkpoints cannot hold these asynchronous rollouts: a resume samples them anew. %s", reason)


def _unpacked(packed: Tensor, place: tuple[int, int], rows: list[dict[str, Any]]) -> Part | None:
    """The part that was packed; None if its prompts are not those of `rows`, or another version packed it."""
    try:
        version, step, prompts, trajectories, metrics = _read(packed)
    except UnpicklingError:
        return None
    part = Part(place, version, step, rows)
    part.result.set_result((trajectories, metrics))
    return part if part.prompts == prompts and isinstance(trajectories, list) else None


def _read(packed: Tensor) -> Any:
    with safe_globals(_STORED):
        return torch.load(BytesIO(packed.numpy().tobytes()), weights_only=True)
