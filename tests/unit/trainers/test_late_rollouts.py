"""Which rollouts begin when, and in which order they are trained on, whatever they take."""

from __future__ import annotations

import threading
import time
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.trainer.utils import RepeatSampler

from sorl_trl.rollout import RolloutLimits
from sorl_trl.rollout.chat import RolloutSetup
from sorl_trl.rollout.engines.vllm import EngineUnavailable
from sorl_trl.trainers import late_rollouts, vllm_policy
from sorl_trl.trainers.host import Host
from sorl_trl.trainers.late_rollouts import Part, RolloutsAhead, _packed, _unpacked
from sorl_trl.types import Action, ActionKind, StopReason, Trajectory, Turn

GROUPS, ROWS, PROMPTS = 2, 2, 6
"""Of a batch, of a group, and in the data set: an epoch is three batches."""


class Run:
    """A trainer without a policy: it takes one batch after the other, and their rollouts take as long as specified.

    It is its rollout as well.
    """

    stop_strings = ()
    engine = None

    def __init__(
        self,
        batches: int,
        staleness: int,
        by_completion: bool,
        latencies: list[float],
        first: int = 0,
        state: dict[str, Any] | None = None,
    ):
        self.latencies, self.begun, self.now = latencies, list[tuple[Any, int]](), first
        dataset = [{"prompt": number} for number in range(PROMPTS)]
        trainer = SimpleNamespace(
            args=SimpleNamespace(
                generation_batch_size=GROUPS * ROWS,
                num_generations=ROWS,
                cycle_steps=1,
                gradient_accumulation_steps=1,
                disable_tqdm=True,
                process_index=0,
            ),
            model=SimpleNamespace(training=True),
            rollout_func=self,
            state=SimpleNamespace(global_step=first, max_steps=batches),
            accelerator=SimpleNamespace(num_processes=1, process_index=0, wait_for_everyone=lambda: None),
            train_dataset=dataset,
            _get_train_sampler=self.sampler,
            _step=0,
            _buffered_inputs=None,
            use_vllm=False,
            _log_metric=lambda name, value: self.logged.setdefault(name, []).append(value),
        )
        self.logged: dict[str, list[float]] = {}
        rollout: Any = self
        self.ahead = RolloutsAhead(Host(trainer), rollout, staleness, by_completion)
        self.trainer, self.batches, self.state = trainer, batches, state
        self.left: dict[str, Any] = {}
        """The state at the end."""

    def setup(self, trainer: Any) -> RolloutSetup:
        return RolloutSetup(None, None, {}, [1], RolloutLimits())

    def fork(self) -> Run:
        return self

    def sampler(self) -> RepeatSampler:
        return RepeatSampler(list(range(PROMPTS)), ROWS, GROUPS, 4, shuffle=True, seed=3)

    def expected(self) -> list[list[int]]:
        """The prompts of all batches."""
        sampler, size = self.sampler(), GROUPS * ROWS
        sampler.repeat_count = 1
        found: list[list[int]] = []
        while len(found) < self.batches:
            indices = list(sampler)
            found += [indices[i : i + size] for i in range(0, len(indices), size)]
        return found[: self.batches]

    def collect(self, setup: Any, prompts: list[int], *_: Any) -> tuple[list[Trajectory], dict[str, float]]:
        self.begun.append((tuple(prompts), self.now))
        self.wait(prompts)
        turn = Turn((1,), "", Action(ActionKind.MESSAGE))
        return [Trajectory((prompt,), (turn,), StopReason.MAX_TURNS) for prompt in prompts], {}

    def wait(self, prompts: list[int]) -> None:
        time.sleep(self.latencies[len(self.begun) % len(self.latencies)])

    def train(self, until: int | None = None) -> list[list[int]]:
        taken = []
        expected = self.expected()
        with self.ahead.running():
            if self.state is not None:
                self.ahead.load_state_dict(self.state)
            self.ahead.begin_at(self.now)
            for batch in range(self.now, self.batches if until is None else until):
                self.now = batch
                rows, trajectories, _ = self.ahead.next(expected[batch])
                taken.append([row["prompt"] for row in rows])
                assert [each.prompt_ids[0] for each in trajectories] == taken[-1]
            self.left = self.ahead.state_dict()
        return taken


class Engine:
    """It samples nothing."""

    def wake(self) -> None: ...

    def rollout_seed(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def _no_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = SimpleNamespace(renew=lambda *_: None, engine=lambda end, options: Engine(), close=lambda: None)
    monkeypatch.setattr(late_rollouts, "PolicyCopies", lambda trainer: policy)


LATENCIES = st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.003, 0.02]), min_size=1, max_size=7)


@settings(deadline=None, max_examples=25)
@given(staleness=st.integers(0, 4), by_completion=st.booleans(), latencies=LATENCIES)
def test_everything_is_trained_on_once_and_never_too_late(
    staleness: int, by_completion: bool, latencies: list[float]
) -> None:
    run = Run(7, staleness, by_completion, latencies)
    taken, expected = run.train(), run.expected()
    assert max(run.logged["async/age_max"]) <= staleness * (1 + 2 * by_completion)
    assert sorted(prompt for batch in taken for prompt in batch) == sorted(p for batch in expected for p in batch)
    assert by_completion or taken == expected
    parts = GROUPS if by_completion else 1
    assert len(run.begun) == 7 * parts, "none began that the run does not come to"


@settings(deadline=None, max_examples=12)
@given(staleness=st.integers(1, 3), latencies=LATENCIES, stopped=st.integers(1, 6))
def test_a_resumed_run_goes_on_with_what_was_passed_by(staleness: int, latencies: list[float], stopped: int) -> None:
    first = Run(7, staleness, True, latencies)
    taken = first.train(until=stopped)
    rest = Run(7, staleness, True, latencies[::-1], first=stopped, state=first.left)
    taken += rest.train()
    assert sorted(prompt for batch in taken for prompt in batch) == sorted(p for b in rest.expected() for p in b)
    assert max(rest.logged["async/age_max"]) <= 3 * staleness


def test_a_straggler_is_passed_by_for_as_many_batches_as_allowed() -> None:
    class Straggling(Run):
        def wait(self, prompts: list[int]) -> None:
            until = time.monotonic() + 10
            while prompts == straggler and self.now < 2 and time.monotonic() < until:
                time.sleep(0.001)

    run = Straggling(8, 1, True, [])
    straggler = run.expected()[0][:ROWS]
    taken = run.train()
    assert [straggler[0] in batch for batch in taken[:3]] == [False, False, True]


def test_the_end_of_a_run_ends_what_is_under_way() -> None:
    class Endless(Run):
        def collect(self, setup: Any, prompts: list[int], *given: Any) -> tuple[list[Trajectory], dict[str, float]]:
            *_, go_on = given
            while prompts != self.expected()[0] and go_on(True):
                time.sleep(0.001)
            return super().collect(setup, prompts)

    run = Endless(4, 1, False, [0.0])
    with run.ahead.running():
        run.ahead.begin_at(0)
        run.ahead.next(run.expected()[0])
    assert not [each for each in threading.enumerate() if each.name.startswith("sorl-ahead")]


def test_what_a_checkpoint_cannot_hold_is_said(caplog: pytest.LogCaptureFixture) -> None:
    part = Part((0, 0), 0, 0, [{"prompt": "a"}])
    made = Trajectory((1,), (), StopReason.MAX_TURNS, {"environments": threading.Lock()})
    part.result.set_result(([made], {}))
    assert _packed(part) is None and "samples them anew" in caplog.text


def test_a_part_is_what_it_was_unless_an_earlier_version_packed_it() -> None:
    part = Part((0, 0), 2, 3, [{"prompt": "a"}])
    trajectory = Trajectory(
        (1,), (Turn((2,), "", Action(ActionKind.MESSAGE)),), StopReason.MAX_TURNS, {"agent_rewards": {"reward": 1.0}}
    )
    part.result.set_result(([trajectory], {"turns": 1.0}))
    packed = _packed(part)
    assert packed is not None and _unpacked(packed, part.place, [{"prompt": "b"}]) is None
    found = _unpacked(packed, part.place, part.rows)
    assert found is not None and (found.version, found.step, found.result.result()) == (2, 3, part.result.result())
    assert found.result.result()[0][0].columns == trajectory.columns
    buffer = BytesIO()
    torch.save((2, 3, ["a"], {"completion_ids": [[2]]}, {"turns": 1.0}), buffer)
    assert _unpacked(torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8), (0, 0), part.rows) is None


def test_another_batch_than_the_sampler_has_shown_is_an_error() -> None:
    run = Run(4, 1, False, [0.0])
    with run.ahead.running(), pytest.raises(RuntimeError, match="neither changes nor skips rows"):
        run.ahead.begin_at(0)
        run.ahead.next([99] * 4)


def test_a_mistake_of_another_process_is_not_taken_for_an_engine_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else this process would write a checkpoint alone, and wait for ever."""

    def fail() -> None:
        raise EngineUnavailable("connection refused")

    monkeypatch.setattr(vllm_policy, "gather_object", lambda mine: [*mine, (False, "no such tool")])
    with pytest.raises(EngineUnavailable, match=r"^connection refused$"):
        vllm_policy.raise_on_all_ranks(None, fail)
    with pytest.raises(RuntimeError, match="another process failed: no such tool"):
        vllm_policy.raise_on_all_ranks(None, lambda: None)
