from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sorl_trl.trainers.config_rules import COUNTS

from sorl_trl import SOGRPOConfig

PENALTY = {"clip_normalization": "kl_penalty"}
BY_OBJECTIVE = {"multi_objective_aggregation": "normalize_then_sum"}


def build(tmp_path: Path, **overrides: Any) -> SOGRPOConfig:
    return SOGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **overrides)


def test_defaults(tmp_path: Path) -> None:
    config = build(tmp_path)
    assert (config.importance_sampling_level, config.ratio_level, config.turn_ratio) == (None, "sequence", "geometric")
    assert (config.epsilon, config.epsilon_high, config.clip_range_scaling_in_use) == (0.2, None, "length")
    assert (config.clip_normalization, config.ctn_coef, config.kl_estimator) == ("none", 3.0, "unbiased")
    assert (config.loss_type, config.gamma, config.turn_boundary) == ("grpo", 1.0, "recorded")
    assert (config.ctn_gate, config.rollout_staleness, config.target_kl) == ("token", 0, 0.005)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "length"),
        ({"loss_type": "turn"}, "length"),
        ({"importance_sampling_level": "turn"}, "sqrt_length"),
        ({"importance_sampling_level": "turn", "turn_ratio": "arithmetic"}, "sqrt_length"),
        ({"importance_sampling_level": "token"}, "none"),
        ({"importance_sampling_level": "sequence"}, "none"),  # as in TRL
        ({"loss_type": "sapo"}, "none"),  # clips no ratio
        ({"loss_type": "minirl"}, "none"),
        ({"loss_type": "minirl", "importance_sampling_level": "turn"}, "sqrt_length"),
        ({"clip_range_scaling": "none"}, "none"),
        ({"clip_range_scaling": "length", "importance_sampling_level": "sequence"}, "length"),
    ],
)
def test_the_range_narrows_where_our_units_share_a_ratio_unless_set(
    tmp_path: Path, given: dict[str, Any], expected: str
) -> None:
    config = build(tmp_path, **given)
    assert config.clip_range_scaling_in_use == expected
    assert config.to_dict()["clip_range_scaling"] == expected  # what trackers are told


@pytest.mark.parametrize(
    ("given", "level"),
    [
        ({}, "sequence"),
        ({"loss_type": "sapo"}, "token"),
        ({"loss_type": "minirl"}, "token"),
        ({"importance_sampling_level": "turn"}, "turn"),
    ],
)
def test_the_level_is_the_sequence_where_ratios_are_clipped_unless_set(
    tmp_path: Path, given: dict[str, Any], level: str
) -> None:
    config = build(tmp_path, **given)
    assert config.ratio_level == level
    assert config.to_dict()["importance_sampling_level"] == level


def test_what_is_not_set_follows_the_other_options_of_a_copy(tmp_path: Path) -> None:
    """As `dataclasses.replace` makes one, which gives each field as the original has it."""
    original = build(tmp_path, ctn_epsilon=0.3, **PENALTY)
    others = {"generation_batch_size": None}  # TRL refuses the one that it has derived itself
    copy = replace(original, importance_sampling_level="token", ctn_epsilon=0.1, **others)
    assert (copy.clip_range_scaling_in_use, copy.ctn_epsilon_high) == ("none", None)
    assert replace(copy, importance_sampling_level="turn", **others).clip_range_scaling_in_use == "sqrt_length"
    assert replace(original, importance_sampling_level="sequence", **others).clip_range_scaling_in_use == "none"


@pytest.mark.parametrize("given", [{}, {"epsilon": 0.1, "epsilon_high": 0.3}])
def test_epsilon_is_trls(tmp_path: Path, given: dict[str, float]) -> None:
    config = build(tmp_path, **given)
    assert (config.epsilon, config.epsilon_high) == (given.get("epsilon", 0.2), given.get("epsilon_high"))


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("importance_sampling_level", "word", "'turn'"),
        ("turn_ratio", "harmonic", "'geometric'"),
        ("clip_normalization", "kl", "'kl_penalty'"),
        ("kl_estimator", "k4", "'unbiased'"),
        ("loss_type", "ppo", "'turn'"),
        ("turn_boundary", "auto", "'recorded'"),
        ("ctn_gate", "sequence", "'turn'"),
        ("clip_range_scaling", "log", "'sqrt_length'"),
        ("ctn_coef", -1.0, "at least 0"),
        ("ctn_coef", float("nan"), "at least 0"),
        ("target_kl", -0.1, "at least 0"),
        ("target_kl", float("inf"), "finite"),
        ("rollout_staleness", -1, "at least 0"),
        ("gamma", 1.5, "[0, 1]"),
        ("gamma", -0.1, "[0, 1]"),
    ],
)
def test_bad_values_are_named(tmp_path: Path, name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError) as error:
        build(tmp_path, **{name: value})
    assert name in str(error.value)
    assert str(value) in str(error.value)
    assert allowed in str(error.value)


@pytest.mark.parametrize("tags", [[], [""]])
def test_splitting_at_tags_needs_tags(tmp_path: Path, tags: list[str]) -> None:
    with pytest.raises(ValueError, match="turn_boundary_tags"):
        build(tmp_path, turn_boundary_tags=["</think>"], turn_boundary_tags=tags)


def test_bias_norm_refuses_reentrant_checkpointing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use_reentrant"):
        build(tmp_path, clip_normalization="bias_norm", gradient_checkpointing_kwargs={"use_reentrant": True})


def test_a_command_line_gives_dictionaries_as_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use_reentrant"):
        build(tmp_path, clip_normalization="bias_norm", gradient_checkpointing_kwargs='{"use_reentrant": true}')
    config = build(tmp_path, clip_normalization="bias_norm", gradient_checkpointing_kwargs='{"use_reentrant": false}')
    assert config.gradient_checkpointing_kwargs == {"use_reentrant": False}


@pytest.mark.parametrize(
    "changed", [{}, {"ctn_epsilon": 0.1, **PENALTY}, {"loss_type": "cispo", "epsilon_high": 5.0}], ids=str
)
def test_a_config_that_was_made_has_no_problem(tmp_path: Path, changed: dict[str, Any]) -> None:
    """With all that `__post_init__` has derived."""
    assert not [*build(tmp_path, **changed).problems()]


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 2.5])
def test_counts_of_a_batch_are_refused_by_name(tmp_path: Path, name: str, value: float) -> None:
    """Before TRL divides by them."""
    with pytest.raises(ValueError, match=f"`{name}` is {value}, but must be a whole number, at least 1"):
        build(tmp_path, **{name: value})


@pytest.mark.parametrize("loss_type", ["cispo", "sapo", "vespo"])
def test_bias_norm_needs_a_loss_that_clips(tmp_path: Path, loss_type: str) -> None:
    with pytest.raises(ValueError, match=rf"bias_norm.*{loss_type}"):
        build(tmp_path, clip_normalization="bias_norm", loss_type=loss_type, epsilon_high=5.0)


@pytest.mark.parametrize(("name", "value"), [("top_entropy_quantile", 0.5), ("off_policy_mask_threshold", 0.1)])
def test_bias_norm_refuses_what_leaves_tokens_out_of_the_loss(tmp_path: Path, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"`{name}` is {value}.*bias_norm"):
        build(tmp_path, clip_normalization="bias_norm", **{name: value})
    build(tmp_path, **{name: value})


@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
def test_cispo_needs_its_cap(tmp_path: Path, level: str) -> None:
    with pytest.raises(ValueError, match=r"`epsilon_high` is not set.*cispo.*epsilon_high=5\.0"):
        build(tmp_path, loss_type="cispo", importance_sampling_level=level)
    assert build(tmp_path, loss_type="cispo", importance_sampling_level=level, epsilon_high=5.0).epsilon_high == 5.0


class TestGateRange:
    def test_is_the_clip_range_unless_set(self, tmp_path: Path) -> None:
        config = build(tmp_path)
        assert (config.ctn_epsilon, config.ctn_epsilon_high) == (None, None)

    def test_either_side_can_be_set_alone(self, tmp_path: Path) -> None:
        config = build(tmp_path, ctn_epsilon_high=0.3, **PENALTY)
        assert (config.ctn_epsilon, config.ctn_epsilon_high) == (None, 0.3)

    @pytest.mark.parametrize("value", [-0.1, float("inf"), float("nan")])
    @pytest.mark.parametrize("name", ["ctn_epsilon", "ctn_epsilon_high"])
    def test_must_be_finite_and_not_negative(self, tmp_path: Path, name: str, value: float) -> None:
        with pytest.raises(ValueError, match=f"`{name}` is {value}"):
            build(tmp_path, **{name: value})

    @pytest.mark.parametrize(
        ("off", "advice"),
        [({}, "Set `clip_normalization='kl_penalty'`, or"), ({**PENALTY, "ctn_gate": "none"}, "Set `ctn_gate` to")],
        ids=str,
    )
    def test_is_refused_where_nothing_reads_it(self, tmp_path: Path, off: dict[str, str], advice: str) -> None:
        with pytest.raises(ValueError, match=rf"`ctn_epsilon` is 0\.2, but nothing reads it.*{advice}"):
            build(tmp_path, ctn_epsilon=0.2, **off)


class TestClipRangeScaling:
    @pytest.mark.parametrize(
        "fields",
        [
            {"importance_sampling_level": "sequence", "loss_type": "dapo"},
            {"importance_sampling_level": "token", "ctn_gate": "turn", **PENALTY},
            {"turn_ratio": "arithmetic", "importance_sampling_level": "sequence"},
        ],
        ids=str,
    )
    def test_other_settings_that_read_it(self, tmp_path: Path, fields: dict[str, Any]) -> None:
        assert build(tmp_path, clip_range_scaling="length", **fields).clip_range_scaling_in_use == "length"

    @pytest.mark.parametrize("scaling", ["sqrt_length", "length"])
    @pytest.mark.parametrize(
        "fields",
        [
            {"importance_sampling_level": "token"},
            {"importance_sampling_level": "token", "ctn_gate": "turn"},
            {"importance_sampling_level": "token", "ctn_gate": "turn", "ctn_coef": 0.0, **PENALTY},
            {"loss_type": "sapo"},
            {"loss_type": "cispo", "epsilon_high": 5.0},
            {"loss_type": "vespo", "importance_sampling_level": "sequence"},
        ],
        ids=str,
    )
    def test_is_refused_where_nothing_reads_it(self, tmp_path: Path, scaling: str, fields: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=f"`clip_range_scaling` is '{scaling}', but nothing clips"):
            build(tmp_path, clip_range_scaling=scaling, **fields)
        assert build(tmp_path, clip_range_scaling="none", **fields).clip_range_scaling_in_use == "none"

    @pytest.mark.parametrize("fields", [{"importance_sampling_level": "token"}, {"loss_type": "sapo"}], ids=str)
    def test_a_gate_that_counts_turns_reads_it(self, tmp_path: Path, fields: dict[str, Any]) -> None:
        config = build(tmp_path, clip_range_scaling="length", ctn_gate="turn", **PENALTY, **fields)
        assert config.clip_range_scaling_in_use == "length"

    def test_the_arithmetic_mean_has_a_law_of_its_own(self, tmp_path: Path) -> None:
        turns = {"importance_sampling_level": "turn", "turn_ratio": "arithmetic"}
        build(tmp_path, clip_range_scaling="sqrt_length", **turns)
        with pytest.raises(ValueError, match=r"`clip_range_scaling` is 'length', but that is for geometric.*'sqrt_l"):
            build(tmp_path, clip_range_scaling="length", **turns)


def test_a_discount_needs_sum_then_normalize(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"multi_objective_aggregation.*'normalize_then_sum'"):
        build(tmp_path, gamma=0.9, multi_objective_aggregation="normalize_then_sum")


def test_generations_must_divide_the_batch(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_generations"):
        build(tmp_path, per_device_train_batch_size=4, num_generations=3)


def test_a_negative_number_of_steps_between_dumps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`save_trajectories_steps` is -1"):
        build(tmp_path, save_trajectories_steps=-1)


@pytest.mark.parametrize("value", ["0.1", None, True, float("nan"), float("inf"), -0.1])
@pytest.mark.parametrize("name", ["ctn_coef", "target_kl", "gamma", "rollout_staleness", "save_trajectories_steps"])
def test_what_is_no_number_is_refused_by_name(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"`{name}` is {value!r}, but must be"):
        build(tmp_path, **{name: value})


@pytest.mark.parametrize("value", ["0.1", float("nan"), float("inf"), -0.1])
@pytest.mark.parametrize("name", ["epsilon", "epsilon_high"])
def test_a_clip_range_that_cannot_be_is_refused(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"`{name}` is {value!r}, but must be finite and at least 0"):
        build(tmp_path, **{name: value})


@pytest.mark.parametrize("name", ["rollout_staleness", "save_trajectories_steps"])
def test_half_a_step_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"`{name}` is 1\.5, but must be a whole number, at least 0"):
        build(tmp_path, **{name: 1.5})


@pytest.mark.parametrize("boundary", ["tags", "recorded"])
def test_a_string_is_no_list_of_tags(tmp_path: Path, boundary: str) -> None:
    """It would be read as a list of letters."""
    with pytest.raises(ValueError, match=r"`turn_boundary_tags` is '</think>', but"):
        build(tmp_path, turn_boundary=boundary, turn_boundary_tags="</think>")


@pytest.mark.parametrize(
    ("given", "option", "said"),
    [
        ({"information_gain_column": "gold"}, "information_gain_column", "`information_gain_coef` is 0"),
        ({"information_gain_prefix": "So: "}, "information_gain_prefix", "`information_gain_coef` is 0"),
        ({"information_gain_coef": 1.0, "remove_unused_columns": True}, "remove_unused_columns", "'golden_answers'"),
        ({"step_advantage_coef": 1.0, **BY_OBJECTIVE}, "multi_objective_aggregation", "'sum_then_normalize'"),
        ({"information_gain_coef": 1.0, **BY_OBJECTIVE}, "multi_objective_aggregation", "'sum_then_normalize'"),
        (
            {"turn_reward_normalization": "separate", **BY_OBJECTIVE},
            "multi_objective_aggregation",
            "'sum_then_normalize'",
        ),
    ],
)
def test_options_of_credit_that_do_not_go_together(
    tmp_path: Path, given: dict[str, Any], option: str, said: str
) -> None:
    with pytest.raises(ValueError, match=f"^`{option}` is .*{re.escape(said)}"):
        build(tmp_path, **given)
