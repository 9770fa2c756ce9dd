"""What the benchmark of critics measures, on cases whose answer is known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import critic_ceiling, critic_trials
from benchmarks.critic_ceiling import made, measurements, once, read
from benchmarks.critic_regression import explained_by, fit
from benchmarks.critic_sampling import State, sample_from, sample_of, states_of
from benchmarks.critic_statistics import StateReturns

from sorl_trl.trainers.critic.model import ValueHead
from sorl_trl.trainers.critic.value_model import ValueModel
from sorl_trl.types import Action, ActionKind, Observation, StopReason, Trajectory, Turn
from tests.policies import build_policy

SEARCH, ANSWER = Action(ActionKind.SEARCH, "q"), Action(ActionKind.ANSWER, "a")
TRAJECTORY = Trajectory(
    (1, 2),
    (Turn((3, 4), "", SEARCH), Observation((5, 6, 7), ""), Turn((8,), "", ANSWER)),
    StopReason.ANSWERED,
)


class TestCeiling:
    def test_by_hand(self) -> None:
        # Means 1/2, 1 and 0; variances within 1/2, 0 and 0, with a divisor of M - 1.
        found = StateReturns([np.array([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])], [3]).estimate()
        within = 1 / 6
        between = 1 / 4 - within / 2
        assert found.by_turn == [pytest.approx(between / (between + within))]
        assert found.overall == pytest.approx(found.by_turn[0])

    def test_nothing_within_is_all_explained(self) -> None:
        found = StateReturns([np.array([[1.0, 1.0], [0.0, 0.0]] * 8)], [16]).estimate()
        assert found.overall == found.by_turn[0] == 1.0
        assert found.intervals[0] == found.interval == (1.0, 1.0)

    def test_is_unbiased(self) -> None:
        """Returns 1 with probability p, uniform on [0, 1]: Var(E[R | s]) = 1/12 of Var(R) = 1/4, however few M."""
        generator = np.random.default_rng(0)
        chances = generator.random((20_000, 1))
        returns = (generator.random((20_000, 3)) < chances).astype(float)
        found = StateReturns([returns], [1]).estimate()
        assert found.overall == pytest.approx(1 / 3, abs=0.02)
        low, high = found.interval
        assert low < 1 / 3 < high < low + 0.05

    def test_turns_weigh_as_their_visits(self) -> None:
        """Turn 0 explains nothing, turn 1 all, and the means are the same: what counts is turn 1's share."""
        nothing, everything = np.array([[0.0, 1.0]] * 4), np.array([[0.0, 0.0], [1.0, 1.0]] * 50)
        found = StateReturns([nothing, everything], [300, 100]).estimate()
        between = (300 * -1 / 4 + 100 * 25 / 99) / 400
        within = (300 / 2) / 400
        assert found.overall == pytest.approx(between / (between + within))

    def test_equal_returns_have_no_variance_to_explain(self) -> None:
        found = StateReturns([np.zeros((4, 2))], [4]).estimate()
        assert math.isnan(found.overall) and math.isnan(found.by_turn[0]) and math.isnan(found.intervals[0][0])


class TestStates:
    def test_where_turns_start(self) -> None:
        assert states_of(7, TRAJECTORY) == [State(7, 0, (1, 2), ()), State(7, 1, (1, 2), (3, 4, 5, 6, 7))]

    def test_the_critic_reads_the_token_before_each_turn(self) -> None:
        short = Trajectory((1, 2, 3), (Turn((9,), "", ANSWER),), StopReason.ANSWERED)
        sample = sample_of([TRAJECTORY, short], [1.0, 0.0])
        assert sample.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 9, 0, 0, 0, 0]]
        assert sample.before_turns.tolist() == [[1, 6], [2, -1]]
        assert sample.lengths.tolist() == [8, 4]


def test_turns_that_are_not_there_are_not_judged() -> None:
    texts = [torch.zeros(size, dtype=torch.long) for size in (4, 4, 2)]
    starts = [torch.tensor(each) for each in ([1, 3], [1, 3], [1])]
    sample = sample_from(texts, starts, torch.tensor([1.0, 0.0, 0.0]))
    values = torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 1e6]])
    found = explained_by(values, sample)
    assert found.overall == 1.0 and found.by_turn == [1.0, 1.0]


def test_a_trajectory_without_a_turn_teaches_nothing() -> None:
    critic = ValueModel(build_policy().model, ValueHead(16))
    starts = [torch.tensor([1, 3]), torch.tensor([], dtype=torch.long)]
    sample = sample_from([torch.ones(4, dtype=torch.long)] * 2, starts, torch.tensor([1.0, 1.0]))
    assert list(fit(critic, sample, epochs=2, seed=0)) == [1, 2]
    assert all(bool(each.isfinite().all()) for each in critic.parameters())


class TestWhatIsKept:
    def test_is_made_once_with_the_same_settings(self, tmp_path: Path) -> None:
        path, calls = tmp_path / "folder/figures.json", iter(range(5))
        assert [once(path, "a", lambda: [next(calls)]) for _ in range(2)] == [[0], [0]]
        assert once(path, "b", lambda: [next(calls)]) == [1]
        assert (made(path, "a"), made(path, "b")) == (None, [1])

    def test_figures_that_do_not_say_their_settings_do_not_count(self, tmp_path: Path) -> None:
        path = tmp_path / "figures.json"
        for written in ({"overall": 0.5}, [{"epoch": 1}]):
            path.write_text(json.dumps(written))
            assert made(path, "a") is None

    def test_a_policy_has_what_was_measured_with_todays_settings(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(critic_ceiling, "RUNS", tmp_path)
        for part, settings in measurements("so_ppo_first", 101).items():
            once(tmp_path / f"so_ppo_first-101/{part}.json", settings, lambda part=part: part)
        assert (read("so_ppo_first", 101)["missing"], read("so_ppo_first", 101)["critic"]) == ([], "critic")
        assert read("so_ppo_first", 102)["missing"] == list(measurements("so_ppo_first", 102))
        monkeypatch.setattr(critic_ceiling, "CONTINUATIONS", 8)
        assert read("so_ppo_first", 101)["missing"] == ["ceiling"]

    def test_trials_depend_on_the_variant_and_the_run(self) -> None:
        trials = {critic_trials.settings_of_trial(name, 101) for name in critic_trials.VARIANTS}
        assert len(trials) == len(critic_trials.VARIANTS)
