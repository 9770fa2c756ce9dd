"""The doctor lists all that is wrong with the arguments; `train.py` stops at the first of the same list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sorl_trl.command_line import UserMistake
from sorl_trl.doctor.reading.arguments import read_arguments
from sorl_trl.doctor.reading.checked_groups import ReadArguments
from sorl_trl.doctor.reading.recipe_file import read_recipe
from sorl_trl.recipe import parse_arguments
from tests.unit.doctor.recipes import line_of, write_recipe

PPO = {"trainer": "so_ppo", "num_generations": 1}


def read(recipe: Path, *words: str) -> ReadArguments:
    return read_arguments(read_recipe(str(recipe), words), ["--config", str(recipe), *words], 1)


def errors(recipe: Path, *words: str) -> list[tuple[str, str]]:
    """Message and line of every error in the arguments."""
    return [(each.what, each.change) for each in read(recipe, *words).findings if each.level == "error"]


def options(recipe: Path, *words: str) -> list[str]:
    """The arguments to change."""
    return [change.split()[0].rstrip(":") for _, change in errors(recipe, *words)]


def test_two_problems_of_one_config_with_their_lines(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, target_kl=-1.0, gamma=2.0)
    assert errors(recipe) == [
        ("`target_kl` is -1.0, but must be finite and at least 0.", f"target_kl  {line_of(recipe, 'target_kl')}"),
        ("`gamma` is 2.0, but must be in [0, 1].", f"gamma  {line_of(recipe, 'gamma')}"),
    ]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        # A field, a rule over several fields, and TRL's own.
        (
            {
                "ctn_coef": -1.0,
                "turn_boundary_tags": ["</think>"],
                "turn_boundary_tags": [""],
                "auto_find_batch_size": True,
            },
            ["ctn_coef", "turn_boundary_tags", "auto_find_batch_size"],
        ),
        # Two of TRL's, which its constructor raises one at a time, and one of transformers'.
        (
            {"auto_find_batch_size": True, "log_completions_hub_repo": "me/it", "bf16": True, "fp16": True},
            ["log_completions_hub_repo", "auto_find_batch_size", "fp16"],
        ),
        # Rules of a method.
        (
            {
                **PPO,
                "critic": "model",
                "critic_trunk_gradient": True,
                "vf_coef": -1.0,
                "multi_objective_aggregation": "normalize_then_sum",
            },
            ["vf_coef", "critic_trunk_gradient", "multi_objective_aggregation"],
        ),
        # Counts, by which TRL would divide.
        (
            {"num_generations": 0, "num_iterations": 0, "epsilon_high": -1.0},
            ["num_generations", "num_iterations", "epsilon_high"],
        ),
        # Several groups of arguments, and what they are together.
        (
            {
                "protocol": "xml",
                "max_turns": -1,
                "search_engine": "faiss",
                "rewards": ["turn_format", "tests"],
                "turn_boundary_tags": ["</think>"],
                "max_completion_length": 0,
            },
            ["rewards", "max_turns", "protocol", "search_engine", "max_completion_length", "rewards"],
        ),
        # `bias_norm` has many conditions.
        (
            {
                "clip_normalization": "bias_norm",
                "loss_type": "sapo",
                "gradient_checkpointing_kwargs": {"use_reentrant": True},
                "top_entropy_quantile": 0.5,
                "ctn_epsilon": 0.1,
            },
            ["ctn_epsilon", "clip_normalization", "gradient_checkpointing_kwargs", "top_entropy_quantile"],
        ),
    ],
    ids=["field, rule, TRL", "TRL alone", "critic", "counts", "groups", "bias_norm"],
)
def test_all_are_listed(tmp_path: Path, changed: dict[str, Any], expected: list[str]) -> None:
    assert sorted(options(write_recipe(tmp_path, **changed))) == sorted(expected)


def test_what_follows_from_a_mended_argument_is_no_finding(tmp_path: Path) -> None:
    """Without its `eval_strategy`, `load_best_model_at_end` would be refused as well."""
    recipe = write_recipe(tmp_path, eval_strategy="sometimes", load_best_model_at_end=True, save_strategy="epoch")
    assert options(recipe) == ["eval_strategy"]


def test_what_is_refused_is_mended_for_the_other_checks(tmp_path: Path) -> None:
    config = read(write_recipe(tmp_path, target_kl=-1.0, loss_type="cispo")).config
    assert config is not None
    assert (config.target_kl, config.epsilon_high) == (type(config).target_kl, 5.0)


@pytest.mark.parametrize(
    "changed",
    [
        {"target_kl": -1.0, "gamma": 2.0},
        {"gamma": 0.5, "multi_objective_aggregation": "normalize_then_sum", "turn_ratio": "harmonic"},
        {"loss_type": "cispo", "ctn_epsilon": 0.1, "ctn_gate": "none"},
        {"search_top_k": 0, "target_kl": -1.0},
        {"rewards": ["tests"], "protocol": "xml"},
        {"corpus": None, "beta": -1.0, "gamma": -1.0},
        {"auto_find_batch_size": True},
        {"log_completions_hub_repo": "me/it", "auto_find_batch_size": True},
        {**PPO, "critic": "model", "critic_trunk_gradient": True, "kl_in_reward": True},
        {"max_completion_length": 0},
        {"turn_boundary_tags": ["</think>"], "rewards": ["turn_format"]},
    ],
    ids=str,
)
def test_train_raises_the_doctors_first(tmp_path: Path, changed: dict[str, Any]) -> None:
    recipe = write_recipe(tmp_path, **changed)
    with pytest.raises(UserMistake) as error:
        parse_arguments(["--config", str(recipe)])
    assert str(error.value) == errors(recipe)[0][0]
