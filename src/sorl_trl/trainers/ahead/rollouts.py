"""The rollouts of a trainer that samples the next batches while it trains on one."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object

from sorl_trl.rollout import Engine, TurnEnd
from sorl_trl.rollout.engine import draw_seed
from sorl_trl.trainers.agents.agent_rollout import AgentRollout
from sorl_trl.trainers.ahead.failures import together
from sorl_trl.trainers.ahead.policies import PolicyCopies, ServerPolicy
from sorl_trl.trainers.cycle.epoch_sampler import cycle_steps, upcoming_batches

_LISTEN_S = 0.5
"""How often the waiting training thread checks for Ctrl-C."""
_JOIN_S = 1.0
"""How long to wait for threads to finish their current step when a run ends."""


@dataclass
class Part:
    """Rows of a batch that one thread samples together: the whole batch, or a group."""

    batch: int
    number: int
    """The index of the part in its batch."""
    version: int
    """How many batches had been taken when it began."""
    step: int
    """How many optimizer steps had been made when it began."""
    rows: list[dict[str, Any]]
    """Rows of the dataset."""
    engine: Engine
    metrics: list[tuple[str, float]] = field(default_factory=list)
    output: Future[dict[str, Any]] = field(default_factory=Future)
    thread: threading.Thread | None = None


class RolloutsAhead:
    """Samples the batches of this process ahead, and hands them out.

    Batch b begins once the sampling policy has the weights that b - `staleness` batches have trained. In the order of
    the dataset, batch b is the b-th to be trained on, so no turn is more than `staleness` versions old. In the order
    of completion, a batch takes the groups that finish first, and others overtake a slow group for at most
    2 * `staleness` batches, so no turn is more than 3 * `staleness` versions old. Nothing is ever dropped.

    Everything that involves random numbers, other processes or metrics happens in the training thread: when a part
    begins, and when it is taken.
    """

    output: dict[str, Any]
    """The rollout of the rows that were taken last."""
    sampled_at: int
    """The optimizer step at which the oldest part that was taken last began, over all processes."""

    def __init__(self, trainer: Any, rollout: AgentRollout, staleness: int, by_completion: bool = False) -> None:
        self._trainer, self._rollout, self._staleness = trainer, rollout, staleness
        self._grace = 2 * staleness if by_completion else 0
        rows = int(trainer.args.generation_batch_size) // trainer.accelerator.num_processes
        self._rows_of_part = int(trainer.num_generations) if by_completion else rows
        self._parts_of_batch = rows // self._rows_of_part
        self._policy = ServerPolicy(trainer) if trainer.use_vllm else PolicyCopies(trainer)
        self._under_way: list[Part] = []
        self._processing_class = copy.deepcopy(trainer.processing_class)
        """A copy for the threads, which only read it: the training thread changes how its own one pads."""
        self._ended = threading.Event()
        self._taken = self._begun = self._last = -1
        self._first = 0
        """The first batch of this run."""
        self._upcoming: Iterator[list[dict[str, Any]]] = iter(())
        self._shown: dict[int, list[Any]] = {}
        """The prompts of the batches that have begun, with which the dataloader's must agree."""
        self._late: set[tuple[int, int]] = set()
        """Parts of the batch taken last and of earlier ones that are still to be trained on."""
        self._early: set[tuple[int, int]] = set()
        """Parts of later batches that have been trained on."""

    def take(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows to train on next, instead of the dataloader's, with their rollout in `output`.

        All processes call it together.

        Raises the error of a rollout under way, on all processes, and RuntimeError if the dataloader's batch is not
        the one that its sampler announced.
        """
        prompts = [row["prompt"] for row in inputs]
        if self._taken < 0:
            self._start()
        together(self._trainer, self._raise_failures)  # before sending weights, because a server may be gone
        together(self._trainer, self._synchronize)  # no process relies on weights that are still under way
        if isinstance(self._policy, ServerPolicy):
            self._check_server(self._policy, prompts)
        self._policy.begin(self._taken)
        together(self._trainer, self._begin_next, prompts)
        parts, waited = self._wait_for_parts()
        self._take(parts)
        outputs = [part.output.result() for part in parts]
        self.output = {key: [each for output in outputs for each in output[key]] for key in outputs[0]}
        self.sampled_at = min(gather_object([min(part.step for part in parts)]))
        self._log(parts, waited)
        self._taken += 1
        return [row for part in parts for row in part.rows]

    def state(self) -> dict[str, Any]:
        """The state that a resumed run needs: which parts of which batches were trained on out of order."""
        out_of_turn = {"late": sorted(self._late), "early": sorted(self._early)}
        return {"parts_of_batch": self._parts_of_batch, "grace": self._grace, **out_of_turn}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a `state`."""
        self._late, self._early = ({(batch, number) for batch, number in state[key]} for key in ("late", "early"))

    def seek(self, micro_batches: int) -> None:
        """Set how many micro-batches of the dataloader the run has consumed, before the first batch is taken.

        The dataloader repeats a batch for a whole cycle. This run takes its first batch when the present cycle ends.
        """
        if self._taken < 0:
            cycle = cycle_steps(self._trainer)
            self._first = (micro_batches + -self._trainer._step % cycle) // cycle

    def close(self) -> None:
        """Abort what is under way. Threads that wait for a tool end when it replies, and the reply is ignored."""
        self._ended.set()
        self._policy.close()
        for part in self._under_way:
            part.engine.wake()
        until = time.monotonic() + _JOIN_S
        for part in self._under_way:
            if part.thread is not None and part.thread.is_alive():
                part.thread.join(max(until - time.monotonic(), 0.0))

    def _start(self) -> None:
        trainer = self._trainer
        self._taken = self._first
        steps = trainer.state.max_steps * trainer.args.gradient_accumulation_steps
        self._last = math.ceil(steps / cycle_steps(trainer))
        trainer._last_loaded_step = -1  # send the weights, whatever an earlier run has sent
        self._begun = min((batch for batch, _ in self._late), default=self._taken)
        self._upcoming = upcoming_batches(trainer, self._begun)

    def _synchronize(self) -> None:
        """Send the weights to a server if they have changed."""
        trainer = self._trainer
        if isinstance(self._policy, ServerPolicy) and trainer.state.global_step != trainer._last_loaded_step:
            self._policy.send()
            trainer._last_loaded_step = trainer.state.global_step

    def _check_server(self, policy: ServerPolicy, prompts: list[Any]) -> None:
        """Compare what the server samples with the trainer's policy, with the same result on all processes."""
        probe: list[Any] = [None]

        def ask() -> None:
            if self._trainer.accelerator.is_main_process:
                probe[0] = policy.probe(self._trainer._tokenize_prompts(prompts[:1])[0][0], self._taken)

        together(self._trainer, ask)
        policy.check(broadcast_object_list(probe)[0])

    def _begin_next(self, prompts: list[Any]) -> None:
        """Begin batches up to `staleness` ahead, but none beyond the end of the run."""
        until = max(min(self._taken + self._staleness + 1, self._last), self._taken + 1)
        while self._begun < until:
            rows = next(self._upcoming)
            if self._begun >= self._taken:
                self._shown[self._begun] = [row["prompt"] for row in rows]
            for number in range(self._parts_of_batch):
                place = self._begun, number
                if place in self._late if self._begun < self._taken else place not in self._early:
                    self._begin(*place, rows[number * self._rows_of_part :][: self._rows_of_part])
            self._begun += 1
        if self._shown.pop(self._taken) != prompts:
            raise RuntimeError(
                f"`async_staleness` is {self._staleness}, but batch {self._taken} of the dataloader is not what its "
                "sampler announced: rollouts cannot be sampled ahead of a dataloader that changes or skips rows."
            )

    def _begin(self, batch: int, number: int, rows: list[dict[str, Any]]) -> None:
        trainer = self._trainer
        view = copy.copy(trainer)  # its thread only reads it
        view.processing_class = self._processing_class
        view._tokenizer = getattr(view.processing_class, "tokenizer", view.processing_class)
        end = TurnEnd(view._tokenizer, self._rollout.protocol.stop_strings, trainer.eos_token_ids)
        engine = _stoppable(self._policy.engine(end, self._rollout.engine), self._ended)
        engine.seed = draw_seed()
        part = Part(batch, number, self._taken, trainer.state.global_step, rows, engine)
        view.rollout_examples, view.engine_ahead = rows, engine
        view._log_metric = lambda name, value: part.metrics.append((name, value))
        name = f"sorl-ahead-{batch}.{number}"
        part.thread = threading.Thread(target=self._collect, args=(part, view), name=name, daemon=True)
        self._under_way.append(part)
        part.thread.start()

    def _collect(self, part: Part, view: Any) -> None:
        try:
            with torch.no_grad():  # each thread has its own switch
                prompts = copy.deepcopy([row["prompt"] for row in part.rows])
                part.output.set_result(self._rollout(prompts, view))
        except BaseException as error:  # the training thread raises it
            part.output.set_exception(error)

    def _wait_for_parts(self) -> tuple[list[Part], float]:
        """The parts to train on next, on all processes, and the seconds waited. Raises what a part has raised."""
        began = time.perf_counter()
        due = [part for part in self._under_way if part.batch <= self._taken - self._grace]
        others = [part for part in self._under_way if part not in due]
        missing = self._parts_of_batch - len(due)
        while True:
            failed = any(part.output.done() and part.output.exception() is not None for part in self._under_way)
            there = [part for part in others if part.output.done()]
            if failed or (len(there) >= missing and all(part.output.done() for part in due)):
                break
            wait([part.output for part in self._under_way if not part.output.done()], _LISTEN_S, FIRST_COMPLETED)
        waited = time.perf_counter() - began
        together(self._trainer, self._raise_failures)
        return [*due, *there[:missing]], waited

    def _raise_failures(self) -> None:
        """Raise the error of a rollout under way, if one has failed."""
        for part in self._under_way:
            if part.output.done():
                part.output.result()

    def _take(self, parts: list[Part]) -> None:
        for part in parts:
            self._under_way.remove(part)
            place = part.batch, part.number
            self._late.discard(place)
            if part.batch > self._taken:
                self._early.add(place)
        self._late |= {(part.batch, part.number) for part in self._under_way if part.batch <= self._taken}
        self._early = {place for place in self._early if place[0] > self._taken}

    def _log(self, parts: list[Part], waited: float) -> None:
        for part in parts:
            for name, value in part.metrics:
                self._trainer._log_metric(name, value)
        versions = [
            turn.versions or (part.version, part.version)
            for part in parts
            for trajectory in part.output.result()["trajectory"]
            for turn in trajectory.turns
        ]
        ages = [self._taken - asked for asked, _ in versions]
        changed = [asked != answered for asked, answered in versions]
        oldest = max(gather_object([max(ages, default=0)]))
        own = {"age_mean": sum(ages) / max(len(ages), 1), "age_max": oldest, "seconds_waiting": waited}
        own["turns_across_versions"] = sum(changed) / max(len(changed), 1)
        for name, value in own.items():
            self._trainer._log_metric(f"async/{name}", float(value))


def _stoppable(engine: Engine, ended: threading.Event) -> Engine:
    """The engine, whose next poll raises CancelledError once the run has ended."""
    poll = engine.poll

    def guarded() -> Any:
        if ended.is_set():
            raise CancelledError("the run has ended")
        return poll()

    engine.poll = guarded  # type: ignore[method-assign]
    return engine
