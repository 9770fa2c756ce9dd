"""Baselines of groups, and groups and trajectories that are not trained on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_trl import SOGRPOConfig, SOGRPOTrainer, SOPPOTrainer
from sorl_trl.ops import turn_starts
from sorl_trl.types import Action, ActionKind, StopReason, Trajectory, Turn
from tests.agents import agent_policy, build_agent, questions
from tests.effects import ROWS, build_trainer, effect
from tests.training import settings, train
from tests.trajectories import FixedRollout, length_reward, parity_reward, prompts

GROUP = 4
LEAVE_ONE_OUT = {"group_baseline": "leave_one_out", "scale_rewards": "none"}


def differing_reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Equal in the groups of every other prompt."""
    rewards = parity_reward(completion_ids)
    return [0.5 if int(prompt.split()[0][1:]) % 2 else r for prompt, r in zip(prompts, rewards, strict=True)]


def shaped_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Tells any two trajectories apart."""
    return [0.01 * (sum(ids) % 13) for ids in completion_ids]


def groups_of(trainer: Any, group: int = GROUP) -> dict[str, Any]:
    """One batch: `ROWS` trajectories of `ROWS / group` prompts."""
    trainer.model.train()
    rows = [dict(row) for row in prompts(ROWS // group) for _ in range(group)]
    batch: dict[str, Any] = trainer._generate_and_score_completions(rows)
    return batch


def build(folder: Path, tokenizer: Any, trainer: str = "SO-GRPO", **overrides: Any) -> Any:
    return build_trainer(folder, tokenizer, trainer, **{"num_generations": GROUP, **overrides})


class TestBaseline:
    def test_outcomes_are_compared_with_the_others_of_their_group(self, tmp_path: Path, tokenizer: Any) -> None:
        """`group_baseline`: n / (n - 1) times TRL's, with n the trajectories that have a reward."""
        found = {}
        for name, given in (("mean", {"scale_rewards": "none"}), ("leave_one_out", LEAVE_ONE_OUT)):
            trainer = build(tmp_path / name, tokenizer, reward_funcs=length_reward, **given)
            batch = groups_of(trainer)
            of_rows = batch["advantages"]
            found[name] = of_rows if of_rows.dim() == 1 else of_rows.amax(1) + of_rows.amin(1)
        scored = trainer._recorder.scored().scored.view(-1, GROUP)
        assert 0 < (~scored).sum() < ROWS
        n = scored.sum(1, keepdim=True)
        expected = found["mean"].view(-1, GROUP) * n / (n - 1)
        torch.testing.assert_close(found["leave_one_out"].view(-1, GROUP), expected)
        assert found["leave_one_out"].abs().max() > found["mean"].abs().max()
        assert trainer._metrics["train"]["advantages/without_baseline"] == [0.0]

    def test_it_changes_the_loss(self, tmp_path: Path, tokenizer: Any) -> None:
        plain = effect(build(tmp_path / "mean", tokenizer, scale_rewards="none"))
        assert plain != effect(build(tmp_path / "leave_one_out", tokenizer, **LEAVE_ONE_OUT))


class TestFilter:
    @pytest.mark.parametrize("trainer", ["SO-GRPO", "SO-PPO"])
    def test_groups_that_agree_are_dropped(self, tmp_path: Path, tokenizer: Any, trainer: str) -> None:
        """`group_filter`: of four groups two have equal rewards."""
        built = build(tmp_path, tokenizer, trainer, group_filter="zero_variance", reward_funcs=differing_reward)
        batch = groups_of(built)
        has_turns = (batch["turn_ids"] >= 0).any(1).view(-1, GROUP)
        assert has_turns.tolist() == [[True] * GROUP, [False] * GROUP] * 2
        assert batch["row_scale"] == 2.0
        assert batch["num_items_in_batch"] == (batch["turn_ids"] >= 0).sum()
        assert batch["turn_counts"].view(-1, GROUP)[1].tolist() == [0] * GROUP
        if trainer == "SO-PPO":
            assert batch["value_units"] == batch["turn_counts"].sum()
            starts = torch.where(turn_starts(batch["turn_ids"]), batch["advantages"], torch.nan)
            assert starts.nanmean().abs() < 1e-5  # whitened over what is left
        metrics = built._metrics["train"]
        assert metrics["groups/kept"] == [0.5]
        assert metrics["groups/kept_std"][0] == pytest.approx(2 * _mean_std(built), rel=1e-5)
        rewards = built._recorder.scored().rewards_per_func.view(-1, GROUP)
        assert metrics["groups/kept_reward"] == [pytest.approx(rewards[::2].mean().item())]
        assert metrics["reward"] == [pytest.approx(rewards.mean().item())]  # of all

    @pytest.mark.parametrize("name", ["top_k", "top_p"])
    def test_the_share_decides(self, tmp_path: Path, tokenizer: Any, name: str) -> None:
        """`group_filter_share`: half of the groups, or of the variance; without it all groups, which differ."""
        kept = []
        for share in (0.5, 1.0):
            given = {"group_filter": name, "group_filter_share": share}
            batch = groups_of(build(tmp_path / str(share), tokenizer, **given))
            kept.append((batch["turn_ids"] >= 0).any(1).view(-1, GROUP).any(1).sum().item())
        assert 1 <= kept[0] <= 2
        assert kept[1] == ROWS // GROUP

    def test_with_every_group_kept_nothing_changes(self, tmp_path: Path, tokenizer: Any) -> None:
        plain = effect(build(tmp_path / "none", tokenizer, num_generations=8))
        assert plain == effect(build(tmp_path / "all", tokenizer, num_generations=8, group_filter="zero_variance"))

    def test_the_named_reward_decides(self, tmp_path: Path, tokenizer: Any) -> None:
        """`group_filter_reward`: by the sum every group differs, and by shaping alone."""
        given = {"group_filter": "zero_variance", "reward_funcs": [shaped_reward, differing_reward]}
        kept = []
        for name in (None, "differing_reward"):
            built = build(tmp_path / str(name), tokenizer, group_filter_reward=name, **given)
            groups_of(built)
            kept += built._metrics["train"]["groups/kept"]
        assert kept == [1.0, 0.5]

    def test_a_name_that_is_no_rewards_is_refused(self, tmp_path: Path, tokenizer: Any) -> None:
        with pytest.raises(ValueError, match=r"`group_filter_reward` is 'accuracy', .* one of 'parity_reward'"):
            build(tmp_path, tokenizer, group_filter="top_k", group_filter_reward="accuracy")

    def test_an_evaluation_counts_every_group(self, tmp_path: Path, tokenizer: Any) -> None:
        built = build(tmp_path, tokenizer, group_filter="zero_variance", reward_funcs=differing_reward)
        built.model.eval()
        rows = [dict(row) for row in prompts(2) for _ in range(GROUP)]
        batch = built._generate_and_score_completions(rows)
        assert (batch["turn_ids"] >= 0).any(1).all()

    @pytest.mark.parametrize("trainer_class", [SOGRPOTrainer, SOPPOTrainer])
    def test_a_run_survives_batches_without_a_group(
        self, tmp_path: Path, tokenizer: Any, trainer_class: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            trainer = train(
                trainer_class,
                trainer_class.config_class,
                tokenizer,
                **settings(tmp_path, group_filter="zero_variance"),
                reward_funcs=lambda completions, **_: [1.0] * len(completions),
            )
        steps = [log for log in trainer.state.log_history if "loss" in log]
        assert [log["loss"] for log in steps] == [0.0] * 5
        assert {log["groups/kept"] for log in steps if "groups/kept" in log} == {0.0}
        assert "learns nothing" in caplog.text
        assert all(p.isfinite().all() for p in trainer.model.parameters())

    def test_training_does_not_depend_on_micro_batches(self, tmp_path: Path, tokenizer: Any) -> None:
        weights = []
        for batch_size, accumulation in ((8, 1), (2, 4)):
            arguments = settings(tmp_path, optim="sgd", learning_rate=3.0, max_steps=2, group_filter="zero_variance")
            arguments |= {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
            arguments |= {"steps_per_generation": accumulation, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
            arguments |= {"reward_funcs": differing_reward, "target_kl": 0.0}
            trainer = train(SOGRPOTrainer, SOGRPOConfig, tokenizer, **arguments)
            weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
        torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=2e-6)


def _mean_std(built: Any) -> float:
    rewards = built._recorder.scored().rewards_per_func.view(-1, GROUP)
    return rewards.std(1).mean().item()


class Acting(FixedRollout):
    """Says of each trajectory what its turns did: in two of three, one of them nothing."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        kinds = [[ActionKind.SEARCH, ActionKind.INVALID if i % 3 else ActionKind.TOOL] for i in range(len(prompts))]
        trajectories = [
            Trajectory((4,), tuple(Turn((5,), "w1", Action(kind)) for kind in row), StopReason.MAX_TURNS)
            for row in kinds
        ]
        return {**super().__call__(prompts, trainer), "trajectory": trajectories}


class TestVoid:
    @pytest.mark.parametrize("trainer", ["SO-GRPO", "SO-PPO"])
    def test_void_trajectories_leave_the_loss_and_stay_in_the_baseline(
        self, tmp_path: Path, tokenizer: Any, trainer: str
    ) -> None:
        """`mask_void_trajectories`: those in which no action parses or a limit has cut a turn off."""
        batches = []
        for is_on in (False, True):
            built = build(tmp_path / str(is_on), tokenizer, trainer, mask_void_trajectories=is_on)
            built.rollout_func = Acting()
            batches.append(groups_of(built))
        plain, masked = batches
        void = torch.arange(ROWS) % 3 > 0
        assert torch.equal((masked["turn_ids"] >= 0).any(1), ~void)
        assert torch.equal(masked["turn_ids"][~void], plain["turn_ids"][~void])
        if trainer == "SO-GRPO":
            assert torch.equal(masked["advantages"][~void], plain["advantages"][~void])
        assert masked["row_scale"] == pytest.approx(ROWS / (~void).sum().item())
        assert built._metrics["train"]["trajectories_void"] == [pytest.approx(void.float().mean().item())]

    def test_a_search_that_does_not_parse_is_void(self, tmp_path: Path) -> None:
        """A random policy writes little else."""
        agent = build_agent(tmp_path, mask_void_trajectories=True)
        agent.model.train()
        examples = [dict(row) for row in questions(4) for _ in range(GROUP)]
        batch = agent._generate_and_score_completions(examples)
        turns = [[turn.action.kind for turn in row["trajectory"].turns] for row in examples]
        assert (batch["turn_ids"] >= 0).any(1).tolist() == [ActionKind.INVALID not in kinds for kinds in turns]

    def test_it_needs_trajectories(self, tmp_path: Path, tokenizer: Any) -> None:
        with pytest.raises(ValueError, match="does not say what its turns did"):
            groups_of(build(tmp_path, tokenizer, mask_void_trajectories=True))

    def test_it_has_no_effect_in_trls_tool_loop(self, tmp_path: Path, tokenizer: Any) -> None:
        config = SOGRPOConfig(**settings(tmp_path, mask_void_trajectories=True))
        with pytest.raises(ValueError, match="no effect without a `rollout_func`"):
            SOGRPOTrainer(agent_policy(), parity_reward, config, prompts(), processing_class=tokenizer)
