"""Every shipped recipe parses, and matches its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from sorl_trl import SOGRPOTrainer, SOPPOTrainer
from sorl_trl.cli.arguments import Arguments, parse_arguments
from sorl_trl.command_line import UserMistake

ROOT = Path(__file__).parents[2]
RECIPES = sorted([*(ROOT / "recipes").glob("*.yaml"), *(ROOT / "examples").glob("*/*.yaml")])
ON_GPUS = ["so_grpo_qwen2.5_3b", "so_grpo_qwen2.5_7b_lora", "so_ppo_qwen2.5_7b_lora"]


def parse(recipe: str | Path, folder: Path, *overrides: str) -> Arguments:
    """As `train.py` does; files and the GPU, which are not here, are replaced."""
    (folder / "data.jsonl").touch()
    here = [
        word
        for name in ("train_questions", "eval_questions", "corpus")
        for word in (f"--{name}", str(folder / "data.jsonl"))
    ]
    here += ["--use_cpu", "true", "--bf16", "false", "--output_dir", str(folder)]
    return parse_arguments(["--config", str(recipe), *here, *overrides])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_parses(recipe: Path, tmp_path: Path) -> None:
    arguments = parse(recipe, tmp_path)
    config = arguments.config
    with_critic = recipe.stem.startswith("so_ppo")
    assert arguments.trainer_class is (SOPPOTrainer if with_critic else SOGRPOTrainer)
    assert arguments.model.use_peft == ("lora" in recipe.stem)
    assert arguments.rollout.max_turn_tokens <= config.max_completion_length
    assert config.generation_batch_size % config.num_generations == 0
    assert not arguments.model.use_peft or arguments.model.lora_dropout == 0.0
    found = arguments.trainer_class.method_for(arguments.trainer.method, config)
    assert found.name == ("so_ppo" if with_critic else "so_grpo"), "a recipe leaves the method to the defaults"


@pytest.mark.parametrize("recipe", ON_GPUS)
def test_a_recipe_for_gpus(recipe: str, tmp_path: Path) -> None:
    """Its trajectories fit, a rollout serves two updates, it evaluates between rollouts, and vLLM sleeps."""
    arguments = parse(recipe, tmp_path)
    config, rollout = arguments.config, arguments.rollout
    longest = rollout.max_turns * (rollout.max_turn_tokens + rollout.max_observation_tokens) + rollout.max_turn_tokens
    assert longest == config.max_completion_length <= config.vllm_max_model_length - 512, "nor is a prompt cut"
    updates = config.steps_per_generation * config.num_iterations / config.gradient_accumulation_steps
    assert updates == 2
    assert config.max_steps % updates == config.eval_steps % updates == config.save_steps % updates == 0
    assert arguments.task.eval_limit is not None
    assert arguments.task.eval_limit % config.per_device_eval_batch_size == 0
    assert config.vllm_enable_sleep_mode


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("--protocol", "xml", "search_r1"),
        ("--collapse_guard", "restart", "stop"),
        ("--trainer", "ppo", "so_ppo"),
        ("--eval_questions", "nowhere.jsonl", "no such file"),
        ("--train_questions", "nq", "examples/public_questions.py"),
        ("--prompt_template", "Answer:", "{question}"),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, name: str, value: str, allowed: str) -> None:
    with pytest.raises(UserMistake) as error:
        parse("so_grpo", tmp_path, "--eval_strategy", "epoch", name, value)
    assert name.removeprefix("--") in str(error.value)
    assert value in str(error.value)
    assert allowed in str(error.value)
