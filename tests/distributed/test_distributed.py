"""Two CPU processes under DDP, FSDP2, and ZeRO-1 to 3 train as one does, also where ranks need unequal turns."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sorl_trl.records.trained import count_trained
from tests.agents import search_index
from tests.distributed.cases import Case, taught_policy
from tests.distributed.launch import launch
from tests.distributed.outcomes import assert_as_alone, assert_loads_plainly
from tests.model_families import MIXTURES, build
from tests.policies import CHAT, build_policy

pytestmark = pytest.mark.distributed
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
every_engine = pytest.mark.parametrize(
    "config",
    ["ddp_cpu", "fsdp2_cpu", *(pytest.param(f"zero{stage}_cpu", marks=needs_deepspeed) for stage in (1, 2, 3))],
)
# A bias of more than 1: below, "bias_norm" leaves the gradient alone.
LARGE_REWARDS = {"scale_rewards": "none", "reward_weights": [20.0]}
PENALTY = {"clip_penalty": {"coef": 3.0, "epsilon": 0.02}}
METHODS: dict[str, dict[str, Any]] = {
    "groups": {
        "method": {"keep": "zero_variance", "credit": "leave_one_out", "terms": [PENALTY]},
        "agreeing": True,
    },
    "engine": {
        "method": {"surrogate": "sapo", "terms": [PENALTY]},
        "turn_rewards": True,
        "options": {"importance_sampling_level": "token", "loss_type": "grpo"},
    },
    "states": {
        "method": {
            "credit": {"gigpo": {"coef": 1.0}},
            "keep": [{"zero_variance": {"reward": "agreeing_reward"}}],
        },
        "agreeing": True,
        "options": {"gamma": 0.9},
    },
    "bias_norm": {"turn_rewards": True, "method": {}, "options": {"bias_norm": True, **LARGE_REWARDS}},
}
"""Every kind of piece, in few cases: what keeps, what credits, what clips, what is added and what scales a step."""


@pytest.fixture
def fixed(tmp_path: Path, tokenizer: Any) -> Case:
    build_policy().double().save_pretrained(tmp_path / "policy")  # no comparison hangs on the order of a sum
    tokenizer.save_pretrained(tmp_path / "policy")
    return Case(str(tmp_path))


@pytest.fixture
def search(tmp_path: Path) -> Case:
    taught_policy(tmp_path / "policy")
    search_index(tmp_path)
    return Case(str(tmp_path), rollout="search", turn_rewards=True, no_baseline=True)


@every_engine
def test_an_agent_behind_the_endpoint(tmp_path: Path, config: str) -> None:
    """Ranks make unequal numbers of calls, in several contexts. Sharded parameters are polled together."""
    taught_policy(tmp_path / "policy", template=CHAT)
    case = Case(str(tmp_path), rollout="endpoint", turn_rewards=True, no_baseline=True)
    if config == "zero3_cpu":
        case = replace(case, lora=True, options={"ds3_gather_for_generation": False})
    result = launch(config, case)
    assert result["turns"] == [[1, 1], [3, 3]]
    assert_as_alone(case, result)


@pytest.mark.launch
@needs_deepspeed
def test_zero3_trains_as_one_process(fixed: Case) -> None:
    """A launch of every CI run: full fine-tuning with turn rewards under the hardest engine."""
    case = replace(fixed, turn_rewards=True)
    result = launch("zero3_cpu", case)
    assert max(log.get("clip_fraction/turn", 0.0) for log in result["logs"]) > 0.1, "nothing was clipped: a weak test"
    assert_as_alone(case, result)


class TestFixedTrajectories:
    @every_engine
    @pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
    def test_trains_as_one_process(self, fixed: Case, tmp_path: Path, config: str, lora: bool) -> None:
        """With outcome rewards; the checkpoint is a plain one."""
        case = replace(fixed, lora=lora, options={"save_strategy": "steps", "save_steps": 4})
        assert_as_alone(case, launch(config, case))
        assert_loads_plainly({tmp_path / "output" / "checkpoint-4": tmp_path / "weights.pt"})

    @every_engine
    def test_turn_rewards(self, fixed: Case, config: str) -> None:
        """One rank has trajectories of one turn only: advantages (B, K) are gathered from different K."""
        case = replace(fixed, lora=True, turn_rewards=True, options={"gamma": 0.9})
        assert_as_alone(case, launch(config, case))

    @pytest.mark.parametrize("name", METHODS)
    def test_methods(self, fixed: Case, name: str) -> None:
        """Groups and states lie on both ranks."""
        case = replace(fixed, **METHODS[name])
        result = launch("ddp_cpu", case)
        if name == "bias_norm":
            assert max(log.get("clipping_bias_norm", 0.0) for log in result["logs"]) > 1, "a weak test"
        assert max(log.get("clip_fraction/turn", 0.0) for log in result["logs"]) > 0.1, "nothing was clipped"
        pieces = {key for log in result["logs"] for key in log if key.startswith("keep/")}
        for key in pieces:
            shown = [log[key] for log in result["logs"] if key in log]
            assert min(shown) < 1.0, f"{key}: a weak test"
        # A mean over the trajectories of a micro-batch that have a token: of how many, depends on the split.
        assert_as_alone(case, result, but_for="kl_to_old" if case.agreeing else "")

    @pytest.mark.parametrize("config", ["ddp_cpu", "fsdp2_cpu", pytest.param("zero3_cpu", marks=needs_deepspeed)])
    def test_information_gain(self, fixed: Case, config: str) -> None:
        """One rank has trajectories of one turn, so that it scores nothing, and makes the other's passes."""
        case = replace(fixed, turn_rewards=True, gain=True, options={"gamma": 0.9})
        result = launch(config, case)
        assert any(abs(log.get("rewards/information_gain/mean", 0.0)) > 1e-4 for log in result["logs"])
        assert_as_alone(case, result)

    def test_refilled_groups(self, fixed: Case) -> None:
        """The ranks agree on which groups are asked again."""
        case = replace(fixed, refill=True, agreeing=True)
        result = launch("ddp_cpu", case)
        assert max(log.get("groups/refilled", 0.0) for log in result["logs"]) > 0.0, (
            "nothing was refilled: a weak test"
        )
        assert_as_alone(case, result)

    def test_replayed_routes(self, fixed: Case, tmp_path: Path) -> None:
        build(MIXTURES["mixtral"]).save_pretrained(tmp_path / "policy")
        eager = {"dtype": "auto", "experts_implementation": "eager"}  # others have no float64
        options = {"router_replay": "r3", "model_init_kwargs": eager, "learning_rate": 0.1}
        options |= {"router_aux_loss_coef": 0.0}  # which depends on how rows are put together
        case = replace(fixed, options=options)
        result = launch("ddp_cpu", case)
        assert result["logs"][-2]["router_replay/rerouted"] > 0.01, "the routers choose the same: a weak test"
        assert_as_alone(case, result)

    def test_target_kl_under_ddp(self, fixed: Case) -> None:
        """Each rank sees half of the trajectories, and both the KL of all."""
        case = replace(fixed, turn_rewards=True, options={"target_kl": 1e-3})
        result = launch("ddp_cpu", case)
        assert min(log["lr_factor"] for log in result["logs"][:-1]) < 1.0, "a weak test"
        assert_as_alone(case, result)

    def test_a_guard_stops_all_processes_and_all_keep_their_trajectories(self, fixed: Case) -> None:
        """Both save the checkpoint of the stop, and each writes its half of the trajectories."""
        case = replace(fixed, stopped=True, options={"save_strategy": "epoch", "save_trajectories_steps": 1})
        result = launch("ddp_cpu", case)
        assert [log["step"] for log in result["logs"] if "reward" in log] == [1, 3]
        output = Path(case.folder) / "output"
        assert len([*output.glob("checkpoint-3/generation_cycle_*")]) == 2
        assert len([*output.glob("trajectories/*_rank_0001.parquet")]) == 3
        assert count_trained(output) == {1: 24, 2: 24, 3: 24}

    @needs_deepspeed
    def test_bias_norm_is_refused_under_zero2(self, fixed: Case) -> None:
        result = launch("zero2_cpu", replace(fixed, options={"bias_norm": True}))
        assert "`bias_norm` is True" in result["refused"] and "DDP" in result["refused"]


class TestCollector:
    """Rank 0's question takes one turn and rank 1's three, in each of two rollouts."""

    @every_engine
    def test_ranks_generate_as_often_as_they_need(self, search: Case, config: str) -> None:
        result = launch(config, search)
        assert result["turns"] == [[1, 1], [3, 3]]
        if config == "fsdp2_cpu":
            assert result["polls"] == [6, 6], "what stays sharded needs all ranks in every call"
        else:
            assert result["polls"] == [2 * 2, 2 * 6], "a turn of three tokens takes two polls, as the first gives two"
        assert_as_alone(search, result)

    @pytest.mark.parametrize("config", ["ddp_cpu", pytest.param("zero2_cpu", marks=needs_deepspeed)])
    def test_ranks_sample_ahead_as_one_process_does(self, search: Case, config: str) -> None:
        options = {"async_staleness": 1, "num_iterations": 1, "max_steps": 3, "beta": 0.0}
        case = replace(search, options=options)
        result = launch(config, case)
        assert [log["async/age_max"] for log in result["logs"][:-1]] == [0.0, 1.0, 1.0]
        assert_as_alone(case, result)

    def test_ranks_take_what_is_completed_first(self, search: Case) -> None:
        """Of ages of its own on each rank: the learning rate, and so the weights, are the same on all."""
        options = {"async_staleness": 1, "async_order": "completed", "num_iterations": 1, "max_steps": 6}
        case = replace(search, options={**options, "target_kl": 1e-10})
        result = launch("ddp_cpu", case)
        assert min(log["lr_factor"] for log in result["logs"][:-1]) < 1.0, "a weak test"
        assert result["spread"] == 0.0

    @needs_deepspeed
    def test_sharded_ranks_are_not_copied(self, search: Case) -> None:
        result = launch("zero3_cpu", replace(search, options={"async_staleness": 1}))
        assert "sharded parameters" in result["refused"]
