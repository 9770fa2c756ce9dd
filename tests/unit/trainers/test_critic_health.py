from __future__ import annotations

import math

import pytest
import torch

from sorl_trl.trainers.critic.health import CriticWatch, critic_metrics
from tests.unit.ops.batches import GARBAGE

NAN = float("nan")
UNIT_TURNS = torch.tensor([[0, 0, 1, -1], [0, -1, 1, 3], [-1, -1, -1, -1]])
VALUES = torch.tensor([[0.0, 2.0, 5.0, NAN], [2.0, NAN, 5.0, 1.0], [NAN] * 4])
RETURNS = torch.tensor([[0.0, 3.0, 1.0, NAN], [3.0, NAN, 1.0, 5.0], [NAN] * 4])
ADVANTAGES = torch.tensor([[1.0, 2.0, -1.0, NAN], [3.0, NAN, 1.0, 0.0], [NAN] * 4])
STATISTICS = ("explained_variance", "value_mean", "return_mean", "advantage_mean", "advantage_std")


def describe(unit_turns: torch.Tensor = UNIT_TURNS) -> dict[str, float]:
    return critic_metrics(VALUES, RETURNS, ADVANTAGES, unit_turns)


@pytest.mark.filterwarnings("error")
class TestCriticMetrics:
    def test_overall_by_hand(self) -> None:
        metrics = describe()
        # Returns 0, 3, 1, 3, 1, 5; residuals 0, 1, -4, 1, -4, 4: mean squares less squared means.
        spread, error = 45 / 6 - (13 / 6) ** 2, 50 / 6 - (2 / 6) ** 2
        assert metrics["critic/explained_variance"] == pytest.approx(1 - error / spread)
        assert metrics["critic/value_mean"] == pytest.approx(15 / 6)
        assert metrics["critic/return_mean"] == pytest.approx(13 / 6)
        assert metrics["advantages/mean"] == 1.0
        assert metrics["advantages/std"] == pytest.approx(math.sqrt(10 / 5))

    def test_by_turn_by_hand(self) -> None:
        metrics = describe()
        first = [metrics[f"critic/turn_0/{name}"] for name in STATISTICS]
        assert first == pytest.approx([8 / 9, 4 / 3, 2.0, 2.0, 1.0])  # variances: residuals 2/9, returns 2
        second = [metrics[f"critic/turn_1/{name}"] for name in STATISTICS]
        assert second == pytest.approx([NAN, 5.0, 1.0, 0.0, math.sqrt(2)], nan_ok=True)  # equal returns
        last = [metrics[f"critic/turn_3/{name}"] for name in STATISTICS]
        assert last == pytest.approx([NAN, 1.0, 5.0, 0.0, NAN], nan_ok=True)  # one unit

    def test_names_are_those_of_the_turns_present(self) -> None:
        overall = {"critic/explained_variance", "critic/value_mean", "critic/return_mean"}
        overall |= {"advantages/mean", "advantages/std"}
        by_turn = {f"critic/turn_{turn}/{name}" for turn in (0, 1, 3) for name in STATISTICS}
        assert set(describe()) == overall | by_turn

    @pytest.mark.parametrize("shape", [(3, 4), (3, 0), (0, 4)])
    def test_no_unit(self, shape: tuple[int, int]) -> None:
        metrics = critic_metrics(*(torch.full(shape, NAN),) * 3, torch.full(shape, -1))
        assert len(metrics) == 5
        assert all(math.isnan(value) for value in metrics.values())

    @pytest.mark.parametrize("garbage", GARBAGE)
    def test_blind_to_what_is_no_unit(self, garbage: float) -> None:
        arrays = [torch.where(UNIT_TURNS >= 0, x, garbage) for x in (VALUES, RETURNS, ADVANTAGES)]
        assert critic_metrics(*arrays, UNIT_TURNS) == pytest.approx(describe(), rel=0, abs=0, nan_ok=True)

    def test_neither_the_order_of_trajectories_nor_padding_matters(self) -> None:
        """Ranks gather rows in their own order, padded to the widest."""
        rows = [2, 1, 0]
        arrays = [torch.nn.functional.pad(x[rows], (0, 3)) for x in (VALUES, RETURNS, ADVANTAGES)]
        metrics = critic_metrics(*arrays, torch.nn.functional.pad(UNIT_TURNS[rows], (0, 3), value=-1))
        assert metrics == pytest.approx(describe(), rel=1e-6, nan_ok=True)

    def test_half_precision_is_reduced_in_float32(self) -> None:
        """No mean of these 3001 numbers, and not their spread, is a number of bfloat16."""
        rising = torch.arange(3001).view(1, -1).remainder(4).bfloat16()
        metrics = critic_metrics(rising / 2, rising, rising, torch.zeros(1, 3001, dtype=torch.int64))
        mean = 4500 / 3001
        assert metrics["critic/explained_variance"] == pytest.approx(0.75)
        assert metrics["critic/value_mean"] == pytest.approx(mean / 2)
        assert metrics["critic/return_mean"] == metrics["advantages/mean"] == pytest.approx(mean)
        assert metrics["advantages/std"] == pytest.approx(math.sqrt((750 * 14 - 3001 * mean**2) / 3000))


class TestCriticWatch:
    @staticmethod
    def warnings(watch: CriticWatch, *observations: float, step: int = 0) -> list[bool]:
        return [watch.observe(x, step) is not None for x in observations]

    def test_warns_once_the_mean_of_a_full_window_is_not_positive(self) -> None:
        assert self.warnings(CriticWatch(0, window=3), -1.0, -1.0, 2.0) == [False, False, True]
        assert self.warnings(CriticWatch(0, window=3), -1.0, -1.0, 2.5) == [False, False, False]

    def test_only_the_window_counts(self) -> None:
        assert self.warnings(CriticWatch(0, window=2), -9.0, 10.0, 1.0, -0.5, 0.0) == [False] * 4 + [True]

    def test_again_only_after_a_positive_mean(self) -> None:
        observations = (0.0, -1.0, -2.0, 3.0, -3.5, -1.0)
        assert self.warnings(CriticWatch(0, window=2), *observations) == [False, True, False, False, True, False]

    def test_warm_up_does_not_count(self) -> None:
        watch = CriticWatch(warmup_steps=5, window=2)
        assert self.warnings(watch, -1.0, -1.0, -1.0, step=4) == [False] * 3
        assert self.warnings(watch, -1.0, -1.0, step=5) == [False, True]

    def test_undefined_is_skipped(self) -> None:
        assert self.warnings(CriticWatch(0, window=2), -1.0, NAN, NAN, -1.0, NAN) == [False] * 3 + [True, False]

    def test_recovers_from_an_infinite_observation(self) -> None:
        watch = CriticWatch(0, window=2)
        assert self.warnings(watch, -math.inf, 1.0, 1.0, -2.0) == [False, True, False, True]

    def test_ten_observations_unless_told_otherwise(self) -> None:
        """A critic that is 0 everywhere, as a new one is, explains nothing: exactly 0."""
        assert self.warnings(CriticWatch(0), *[0.0] * 12) == [False] * 9 + [True, False, False]

    def test_the_text_says_what_was_measured_and_what_to_change(self) -> None:
        watch = CriticWatch(0, window=2)
        watch.observe(-0.25, 0)
        text = watch.observe(-0.5, 1)
        assert text is not None
        assert "-0.375" in text
        assert "last 2 rollouts" in text
        names = ("critic_warmup_steps", "critic_learning_rate", "gae_lambda", "generation_batch_size", "critic")
        assert all(f"`{name}`" in text for name in names)

    def test_refuses_an_empty_window(self) -> None:
        with pytest.raises(ValueError, match=r"`window` is 0, but must be a whole number, at least 1"):
            CriticWatch(0, window=0)
