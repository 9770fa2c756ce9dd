"""Every shipped recipe parses, and sets what the table of named variants says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from train import AgentArguments
from trl import ModelConfig, TrlParser

from sorl_trl import SOGRPOConfig

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SO_GRPO = {"importance_sampling_level": "turn", "clip_normalization": "kl_penalty", "loss_type": "turn"}
BASELINE = {"clip_normalization": "none", "loss_type": "grpo"}
VARIANTS: dict[str, dict[str, Any]] = {
    "quickstart": SO_GRPO | {"turn_ratio": "geometric"},
    "so_grpo": SO_GRPO | {"turn_ratio": "geometric"},
    "so_grpo_lora": SO_GRPO | {"turn_ratio": "geometric"},
    "so_grpo_arithmetic": SO_GRPO | {"turn_ratio": "arithmetic"},
    "so_grpo_qwen2.5_3b": SO_GRPO | {"turn_ratio": "geometric"},
    "so_grpo_qwen2.5_7b_lora": SO_GRPO | {"turn_ratio": "geometric"},
    "grpo": BASELINE | {"importance_sampling_level": "token"},
    "gspo": BASELINE | {"importance_sampling_level": "sequence"},
}


def parse(recipe: Path, folder: Path, *overrides: str) -> tuple[AgentArguments, SOGRPOConfig, ModelConfig]:
    """The three dataclasses of `train.py`; files and the GPU, which are not here, are replaced."""
    (folder / "data.jsonl").touch()
    here = ["--train_questions", str(folder / "data.jsonl"), "--corpus", str(folder / "data.jsonl")]
    here += ["--use_cpu", "true", "--bf16", "false", "--output_dir", str(folder)]
    parser = TrlParser((AgentArguments, SOGRPOConfig, ModelConfig))
    return parser.parse_args_and_config(["--config", str(recipe), *here, *overrides])


def test_every_recipe_is_listed() -> None:
    assert {recipe.stem for recipe in RECIPES} == set(VARIANTS)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_parses(recipe: Path, tmp_path: Path) -> None:
    agent, config, model = parse(recipe, tmp_path)
    assert {name: getattr(config, name) for name in VARIANTS[recipe.stem]} == VARIANTS[recipe.stem]
    assert model.use_peft == ("lora" in recipe.stem)
    assert agent.max_turn_tokens <= config.max_completion_length
    assert config.generation_batch_size % config.num_generations == 0


def test_every_field_can_be_overridden(tmp_path: Path) -> None:
    overrides = ["--learning_rate", "1e-5", "--search_top_k", "7", "--turn_ratio", "arithmetic", "--lora_r", "3"]
    agent, config, model = parse(ROOT / "recipes/so_grpo.yaml", tmp_path, *overrides)
    assert (config.learning_rate, agent.search_top_k, config.turn_ratio, model.lora_r) == (1e-5, 7, "arithmetic", 3)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("--rewards", "accuracy", "exact_match"),
        ("--protocol", "xml", "search_r1"),
        ("--train_questions", "nowhere.jsonl", "no such file"),
        ("--corpus", "nowhere.jsonl", "no such file"),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, name: str, value: str, allowed: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(ROOT / "recipes/so_grpo.yaml", tmp_path, name, value)
    assert name.removeprefix("--") in str(error.value)
    assert value in str(error.value)
    assert allowed in str(error.value)
