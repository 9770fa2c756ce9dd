"""Options of groups that mean nothing together are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sorl_trl import SOGRPOConfig, SOPPOConfig

LEAVE_ONE_OUT = {"group_baseline": "leave_one_out", "scale_rewards": "none"}
SIZES = {"per_device_train_batch_size": 8, "num_generations": 4}


def build(config_class: Any, folder: Path, **overrides: Any) -> Any:
    return config_class(str(folder), use_cpu=True, bf16=False, **{**SIZES, **overrides})


@pytest.mark.parametrize("scale_rewards", ["group", "batch", True])
def test_leave_one_out_is_not_scaled(tmp_path: Path, scale_rewards: Any) -> None:
    """G / (G - 1) times an advantage over the standard deviation of a group that nearly agrees is a spike."""
    with pytest.raises(ValueError, match=r"`scale_rewards` is .* second time"):
        build(SOGRPOConfig, tmp_path, group_baseline="leave_one_out", scale_rewards=scale_rewards)
    build(SOGRPOConfig, tmp_path, group_baseline="leave_one_out", scale_rewards=False)


@pytest.mark.parametrize(
    ("config_class", "given", "message"),
    [
        (SOGRPOConfig, {**LEAVE_ONE_OUT, "num_generations": 1}, "at least 2 generations"),
        (
            SOGRPOConfig,
            {**LEAVE_ONE_OUT, "multi_objective_aggregation": "normalize_then_sum"},
            "`multi_objective_aggregation` is 'normalize_then_sum'",
        ),
        (SOPPOConfig, {"group_baseline": "leave_one_out"}, "`scale_rewards`|`group_baseline` is 'leave_one_out'"),
        (SOPPOConfig, LEAVE_ONE_OUT, "`group_baseline` is 'leave_one_out', but the advantages of SO-PPO"),
        (SOPPOConfig, {"group_filter": "top_k", "num_generations": 1}, "`num_generations` is 1"),
        (SOPPOConfig, {"group_filter": "top_k", "group_refill": 1}, "`group_refill` is 1, but a critic"),
        (SOGRPOConfig, {"group_refill": 1}, "`group_refill` is 1, but `group_filter` is 'none'"),
        (
            SOGRPOConfig,
            {"group_filter": "top_k", "group_refill": 1, "scale_rewards": "batch"},
            "`scale_rewards` is 'batch': advantages that are scaled by a batch",
        ),
        (
            SOGRPOConfig,
            {"group_filter": "top_k", "group_refill": 1, "remove_unused_columns": True},
            "`remove_unused_columns` is True",
        ),
        (SOGRPOConfig, {"group_filter": "best"}, "`group_filter` is 'best'"),
        (SOGRPOConfig, {"group_filter": "top_k", "group_filter_share": 1.5}, "`group_filter_share` is 1.5"),
        (SOGRPOConfig, {"group_filter_share": 0.5}, "`group_filter_share` is 0.5, but nothing reads it"),
        (SOGRPOConfig, {"group_filter": "zero_variance", "group_filter_share": 0.5}, "nothing reads it"),
        (SOGRPOConfig, {"group_filter_reward": "exact"}, "`group_filter_reward` is 'exact', but nothing reads it"),
        (SOGRPOConfig, {"group_filter": "top_p", "loss_type": "bnpo"}, "`loss_type` is 'bnpo', but `group_filter`"),
        (
            SOGRPOConfig,
            {"mask_void_trajectories": True, "loss_type": "bnpo"},
            "`loss_type` is 'bnpo', but `mask_void_trajectories`",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(
    tmp_path: Path, config_class: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(config_class, tmp_path, **given)


@pytest.mark.parametrize(
    ("config_class", "given"),
    [
        (SOGRPOConfig, LEAVE_ONE_OUT),
        (SOGRPOConfig, {"group_filter": "top_k", "group_filter_share": 0.25, "mask_void_trajectories": True}),
        (SOPPOConfig, {"group_filter": "top_p", "group_filter_share": 0.9, "mask_void_trajectories": True}),
    ],
)
def test_what_goes_together(tmp_path: Path, config_class: Any, given: dict[str, Any]) -> None:
    config = build(config_class, tmp_path, **given)
    assert all(getattr(config, name) == value for name, value in given.items())
