"""Two CPU processes under DDP and ZeRO-1, 2 and 3 train as one process does, also where ranks need unequal turns."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.agents import search_index
from tests.distributed.cases import Case, taught_policy
from tests.distributed.launch import launch
from tests.distributed.outcomes import SAME_METRICS, assert_as_alone, assert_loads_plainly, train_alone
from tests.policies import build_policy

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
every_engine = pytest.mark.parametrize(
    "config",
    ["ddp_cpu", *(pytest.param(f"zero{stage}_cpu", marks=needs_deepspeed) for stage in (1, 2, 3))],
)
# Some clipping, and a bias of more than 1: below, "bias_norm" leaves the gradient alone.
LARGE_REWARDS = {"scale_rewards": "none", "reward_weights": [20.0]}

LOSS: dict[str, Any] = {"loss_type": "minirl", "importance_sampling_level": "turn", "llds_coef": 0.5}
LOSS |= {"clip_normalization": "kl_penalty", "ctn_gate": "turn", "epsilon": 0.02, "learning_rate": 4.0}
GROUPS: dict[str, Any] = {"group_filter": "zero_variance", "group_refill": 1, "mask_void_trajectories": True}
GROUPS |= {"group_baseline": "leave_one_out", "scale_rewards": "none"}
CREDIT: dict[str, Any] = {"information_gain_coef": 1.0, "information_gain_column": "prompt"}
CREDIT |= {"turn_reward_normalization": "separate", "step_advantage_coef": 1.0, "gamma": 0.9}
SHARE = {"group_filter": "top_p", "group_filter_share": 0.5, "group_filter_reward": "agreeing_reward"}
TOGETHER: dict[str, dict[str, Any]] = {
    "groups": {**LOSS, **GROUPS},
    "credit": {**CREDIT, **SHARE, "double_sided_clip": True, "loss_type": "turn"},
}


@pytest.fixture
def fixed(tmp_path: Path, tokenizer: Any) -> Case:
    build_policy().save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    return Case(str(tmp_path))


@pytest.fixture
def search(tmp_path: Path) -> Case:
    taught_policy(tmp_path / "policy")
    search_index(tmp_path)
    return Case(str(tmp_path), rollout="search", turn_rewards=True)


@pytest.mark.parametrize("turn_rewards", [True, False])
def test_micro_batches_add_up(fixed: Case, turn_rewards: bool) -> None:
    """The same trajectories in 1, 2 or 3 micro-batches give the same steps."""
    case = replace(fixed, turn_rewards=turn_rewards, micro_batches=1)
    logs, weights = train_alone(case)
    assert max(log.get("clip_fraction/turn", 0.0) for log in logs) > 0.1, "nothing was clipped: a weak test"
    for micro_batches in (2, 3):
        other_logs, other = train_alone(replace(case, micro_batches=micro_batches))
        for a, b in zip(logs[:-1], other_logs[:-1], strict=True):
            assert {key: b[key] for key in SAME_METRICS if key in b} == pytest.approx(
                {key: a[key] for key in SAME_METRICS if key in a}, abs=1e-5
            )
        for name, weight in weights.items():
            torch.testing.assert_close(other[name], weight, rtol=0, atol=1e-6)


@pytest.mark.distributed
@pytest.mark.launch
@needs_deepspeed
def test_zero3_trains_as_one_process(fixed: Case) -> None:
    """A launch of every CI run: full fine-tuning with turn rewards under the hardest engine."""
    case = replace(fixed, turn_rewards=True)
    result = launch("zero3_cpu", case)
    assert max(log.get("clip_fraction/turn", 0.0) for log in result["logs"]) > 0.1, "nothing was clipped: a weak test"
    assert_as_alone(case, result)


@pytest.mark.distributed
class TestFixedTrajectories:
    @every_engine
    @pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
    def test_trains_as_one_process(self, fixed: Case, config: str, lora: bool) -> None:
        """With outcome rewards; the checkpoint is a plain one."""
        case = replace(fixed, lora=lora, options={"save_strategy": "steps", "save_steps": 4})
        assert_as_alone(case, launch(config, case))
        assert_loads_plainly(case)

    @every_engine
    def test_turn_rewards(self, fixed: Case, config: str) -> None:
        """One rank has trajectories of one turn only: advantages (B, K) are gathered from different K."""
        case = replace(fixed, lora=True, turn_rewards=True, options={"gamma": 0.9})
        assert_as_alone(case, launch(config, case))

    @pytest.mark.parametrize("rounds", [0, 2])
    def test_ranks_choose_the_same_groups(self, fixed: Case, rounds: int) -> None:
        """The group that lies on both ranks is one of those that agree, in the first rollout."""
        case = replace(fixed, agreeing=True, options={"group_filter": "zero_variance", "group_refill": rounds})
        result = launch("ddp_cpu", case)
        assert min(log.get("groups/kept", 1.0) for log in result["logs"]) < 1.0, "nothing was dropped: a weak test"
        if rounds:
            assert max(log.get("groups/refilled", 0.0) for log in result["logs"]) > 0.0, "nothing was refilled"
        # A mean over the trajectories of a micro-batch that have a token: of how many, depends on the split.
        assert_as_alone(case, result, but_for="kl_to_old")

    @pytest.mark.parametrize("config", ["ddp_cpu", pytest.param("zero3_cpu", marks=needs_deepspeed)])
    def test_credit_of_turns(self, fixed: Case, config: str) -> None:
        """One rank has trajectories of one turn, so that it scores nothing; a group lies on both.

        The prompt is as good a golden answer as any.
        """
        case = replace(fixed, turn_rewards=True, options=CREDIT)
        result = launch(config, case)
        assert any("information_gain/mean" in log and "turns/shared_state" in log for log in result["logs"])
        assert_as_alone(case, result)

    @pytest.mark.parametrize("name", TOGETHER)
    def test_switches_together(self, fixed: Case, name: str) -> None:
        """Groups, void trajectories, credit and terms of the loss, in few choices of `tests/switches.py`'s."""
        case = replace(fixed, agreeing=True, options=TOGETHER[name])
        result = launch("ddp_cpu", case)
        assert min(log.get("groups/kept", 1.0) for log in result["logs"]) < 1.0, "no group was dropped: a weak test"
        assert max(log.get("clip_fraction/turn", 0.0) for log in result["logs"]) > 0.1, "nothing was clipped"
        # A mean over the trajectories of a micro-batch that have a token: of how many, depends on the split.
        assert_as_alone(case, result, but_for="kl_to_old")

    @pytest.mark.parametrize("config", ["ddp_cpu", pytest.param("zero3_cpu", marks=needs_deepspeed)])
    def test_turns_one_at_a_time(self, fixed: Case, config: str) -> None:
        """One rank has first turns alone, and goes through the passes of the other's later turns with nothing.

        No trajectory has the fifth turn.
        """
        options = {"num_iterations": 5, "max_steps": 10}
        result = launch(config, replace(fixed, trainer="seeupo", options=options))
        logs = result["logs"][:-1]
        assert [log["seeupo/turn"] for log in logs] == [4, 3, 2, 1, 0] * 2
        assert max(log["seeupo/multiplier_max"] or 0 for log in logs) > 1.01, "no multiplier has moved: a weak test"
        # A mean over the trajectories of a micro-batch that have the turn: of how many, depends on the split.
        assert_as_alone(replace(fixed, trainer="seeupo", options=options), result, but_for="kl_to_old")

    def test_bias_norm_under_ddp(self, fixed: Case) -> None:
        case = replace(fixed, turn_rewards=True, options={"clip_normalization": "bias_norm", **LARGE_REWARDS})
        result = launch("ddp_cpu", case)
        assert max(log.get("clipping_bias_norm", 0.0) for log in result["logs"]) > 1, "not normalized: a weak test"
        assert_as_alone(case, result)

    def test_llds_and_the_sample_size_under_ddp(self, fixed: Case) -> None:
        """Good trajectories are not spread evenly over the ranks."""
        case = replace(fixed, turn_rewards=True, options={"llds_coef": 0.5, "double_sided_clip": True})
        result = launch("ddp_cpu", case)
        assert max(log.get("llds/loss", 0.0) for log in result["logs"]) > 1e-3, "nothing has fallen: a weak test"
        assert min(log.get("effective_sample_size", 1.0) for log in result["logs"]) < 0.999
        assert_as_alone(case, result)

    @needs_deepspeed
    def test_bias_norm_is_refused_under_zero2(self, fixed: Case) -> None:
        result = launch("zero2_cpu", replace(fixed, options={"clip_normalization": "bias_norm"}))
        assert "Use `clip_normalization='kl_penalty'`, or DDP" in result["refused"]


@pytest.mark.distributed
class TestCollector:
    """Rank 0's question takes one turn and rank 1's three, in each of two rollouts."""

    @every_engine
    def test_ranks_generate_as_often_as_they_need(self, search: Case, config: str) -> None:
        result = launch(config, search)
        assert result["turns"] == [[1, 1], [3, 3]]
        assert result["polls"] == [2 * 2, 2 * 6], "a turn of three tokens takes two polls, as the first gives two"
        assert_as_alone(search, result)

    @needs_deepspeed
    def test_sharded_ranks_generate_equally_often(self, search: Case) -> None:
        """Parameters that are not gathered need all ranks in every call: rank 0 fills up with dummy rows."""
        case = replace(search, lora=True, options={"ds3_gather_for_generation": False})
        result = launch("zero3_cpu", case)
        assert result["turns"] == [[1, 1], [3, 3]]
        assert result["polls"] == [6, 6]
        assert_as_alone(case, result)
