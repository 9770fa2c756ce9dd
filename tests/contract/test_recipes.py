"""Every shipped recipe parses, and sets what the table of named variants says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sorl_trl import SeeUPOTrainer, SOGRPOConfig, SOGRPOTrainer, SOPPOConfig, SOPPOTrainer
from sorl_trl.methods import Method
from sorl_trl.recipe import Arguments, parse_arguments
from sorl_trl.sandbox import THINKING_LIMITS
from sorl_trl.trainers.checks.inert import inert_warning
from sorl_trl.trainers.checks.options import idle_options, search_rollout_problems

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SO_GRPO = {
    "epsilon": 0.2,
    "epsilon_high": None,
    "clip_range_scaling_in_use": "length",
    "target_kl": 0.005,
    "importance_sampling_level": "sequence",
    "method": Method(),
    "loss_type": "grpo",
}
TURNS = SO_GRPO | {
    "clip_range_scaling_in_use": "sqrt_length",
    "importance_sampling_level": "turn",
    "turn_ratio": "geometric",
    "loss_type": "turn",
}
SPECIFIED = TURNS | {
    "epsilon_high": 0.2,
    "clip_range_scaling_in_use": "none",
    "clip_normalization": "kl_penalty",
    "target_kl": 0.0,
    "turn_ratio": "arithmetic",
}
"""What the note says, and nothing of ours."""
SO_PPO = SO_GRPO | {"advantage_level": "turn", "num_generations": 1}
PPO = {
    "target_kl": 0.0,
    "advantage_level": "token",
    "loss_type": "grpo",
    "num_generations": 1,
    "epsilon": 0.2,
    "epsilon_high": None,
    "clip_range_scaling_in_use": "none",
}
BASELINE = {
    "target_kl": 0.0,
    "method": Method(),
    "loss_type": "grpo",
    "epsilon": 0.2,
    "epsilon_high": None,
    "clip_range_scaling_in_use": "none",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "quickstart": SO_GRPO,
    "so_grpo": SO_GRPO,
    "so_grpo_turn": TURNS,
    "so_grpo_lora": SO_GRPO,
    "so_grpo_specified": SPECIFIED,
    "st_grpo": BASELINE
    | {"importance_sampling_level": "turn", "turn_ratio": "geometric", "clip_normalization": "bias_norm"},
    "so_grpo_qwen2.5_3b": SO_GRPO,
    "so_grpo_qwen2.5_7b_lora": SO_GRPO,
    "grpo": BASELINE | {"importance_sampling_level": "token"},
    "igpo": BASELINE
    | {"importance_sampling_level": "token", "information_gain_coef": 1.0, "turn_reward_normalization": "separate"},
    "gigpo": BASELINE | {"importance_sampling_level": "token", "step_advantage_coef": 1.0, "gamma": 0.95},
    "llds": BASELINE | {"importance_sampling_level": "token", "llds_coef": 0.2},
    "double_sided_clip": BASELINE | {"importance_sampling_level": "token", "double_sided_clip": True},
    "void_trajectories": BASELINE | {"importance_sampling_level": "token", "mask_void_trajectories": True},
    "ragen2": BASELINE
    | {"importance_sampling_level": "token", "group_filter": "top_p", "group_filter_share": 0.9, "group_refill": 0},
    "dapo": BASELINE
    | {
        "importance_sampling_level": "token",
        "epsilon_high": 0.28,
        "group_filter": "zero_variance",
        "group_refill": 2,
        "loss_type": "dapo",
    },
    "reinforce": BASELINE
    | {"importance_sampling_level": "token", "loss_type": "dapo", "scale_rewards": "batch", "num_iterations": 1},
    "gspo": BASELINE | {"importance_sampling_level": "sequence"},
    "gspo_authors": BASELINE | {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "minirl": BASELINE
    | {"importance_sampling_level": "token", "loss_type": "minirl", "epsilon_high": 0.27, "scale_rewards": "none"},
    "seeupo": BASELINE
    | {"importance_sampling_level": "turn", "turn_ratio": "geometric", "scale_rewards": "batch", "num_iterations": 4},
    "so_ppo": SO_PPO,
    "so_ppo_turn": SO_PPO | TURNS,
    "so_ppo_lora": SO_PPO,
    "so_ppo_specified": SO_PPO | SPECIFIED,
    "so_ppo_qwen2.5_7b_lora": SO_PPO,
    "ppo": PPO | {"importance_sampling_level": "token", "method": Method(), "loss_type": "bnpo"},
    "turn_ppo": PPO | {"importance_sampling_level": "turn", "turn_ratio": "geometric", "method": Method()},
    "s_ppo": PPO | {"importance_sampling_level": "token", "clip_normalization": "bias_norm"},
    "st_ppo": PPO
    | {"importance_sampling_level": "turn", "turn_ratio": "geometric", "clip_normalization": "bias_norm"},
    "loop": BASELINE
    | {
        "importance_sampling_level": "token",
        "epsilon": 0.0909,
        "epsilon_high": 0.1,
        "num_generations": 6,
        "group_baseline": "leave_one_out",
        "scale_rewards": "none",
    },
    "starpo_s": PPO
    | {
        "importance_sampling_level": "token",
        "method": Method(),
        "loss_type": "dapo",
        "epsilon_high": 0.28,
        "num_generations": 8,
        "group_filter": "top_k",
        "group_filter_share": 0.25,
        "beta": 0.0,
    },
}
WITH_A_CRITIC = {name for name in VARIANTS if "ppo" in name} | {"starpo_s"}
BATCHES = {"loop": 120}
"""Trajectories of a batch where 128 are not whole groups."""
SANDBOX = {name for name in VARIANTS if "qwen" not in name}


def parse(recipe: Path, folder: Path, *overrides: str) -> Arguments:
    """As `train.py` does; files and the GPU, which are not here, are replaced."""
    (folder / "data.jsonl").touch()
    here = ["--train_questions", str(folder / "data.jsonl"), "--corpus", str(folder / "data.jsonl")]
    here += ["--use_cpu", "true", "--bf16", "false", "--output_dir", str(folder)]
    return parse_arguments(["--config", str(recipe), *here, *overrides])


def test_every_recipe_is_listed() -> None:
    assert {recipe.stem for recipe in RECIPES} == set(VARIANTS)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_parses(recipe: Path, tmp_path: Path) -> None:
    arguments = parse(recipe, tmp_path)
    config = arguments.config
    assert {name: getattr(config, name) for name in VARIANTS[recipe.stem]} == VARIANTS[recipe.stem]
    others = dict.fromkeys(WITH_A_CRITIC, SOPPOTrainer) | {"seeupo": SeeUPOTrainer}
    assert arguments.trainer_class is others.get(recipe.stem, SOGRPOTrainer)
    assert arguments.model.use_peft == ("lora" in recipe.stem)
    assert arguments.rollout.max_turn_tokens <= config.max_completion_length
    assert config.generation_batch_size % config.num_generations == 0
    assert inert_warning(config) is None
    assert not [*search_rollout_problems(config), *idle_options(config)]
    assert config.disable_dropout
    assert not arguments.model.use_peft or arguments.model.lora_dropout == 0.0


@pytest.mark.parametrize("name", sorted(SANDBOX))
def test_the_sandbox_recipes_have_equal_batches(name: str, tmp_path: Path) -> None:
    config = parse(ROOT / f"recipes/{name}.yaml", tmp_path).config
    updates = config.num_iterations * config.steps_per_generation // config.gradient_accumulation_steps
    expected = 1 if name == "reinforce" else 8
    assert (config.generation_batch_size, updates, config.max_steps) == (BATCHES.get(name, 128), expected, 240)


@pytest.mark.parametrize("name", sorted(SANDBOX))
def test_the_sandbox_recipes_have_room_for_what_their_policy_thinks(name: str, tmp_path: Path) -> None:
    arguments = parse(ROOT / f"recipes/{name}.yaml", tmp_path)
    assert arguments.rollout.limits(arguments.config.max_completion_length) == THINKING_LIMITS


@pytest.mark.parametrize("name", sorted(SANDBOX))
def test_a_recipe_with_what_is_ours_says_so_in_its_first_line(name: str) -> None:
    """A target KL and a clip range that narrows are no part of SORL."""
    text = (ROOT / f"recipes/{name}.yaml").read_text()
    is_ours = VARIANTS[name]["target_kl"] > 0 or VARIANTS[name]["clip_range_scaling_in_use"] != "none"
    assert bool(re.search(r"our defaults|are ours", text.splitlines()[0])) == is_ours


def test_the_readme_names_the_recipes_with_a_clip_range_of_their_own() -> None:
    """All others of the sandbox clip at 0.2, as it says."""
    (named,) = re.findall(
        r"`gspo_authors` clips at.*?All other recipes", (ROOT / "recipes/README.md").read_text(), re.S
    )
    ranges = {name: {VARIANTS[name]["epsilon"], VARIANTS[name]["epsilon_high"]} - {None} for name in SANDBOX}
    assert {*re.findall(r"`(\w+)`", named)} == {name for name, sides in ranges.items() if sides != {0.2}}


def test_every_field_can_be_overridden(tmp_path: Path) -> None:
    overrides = ["--learning_rate", "1e-5", "--search_top_k", "7", "--turn_ratio", "arithmetic", "--lora_r", "3"]
    arguments = parse(ROOT / "recipes/so_grpo.yaml", tmp_path, *overrides)
    rollout, config = arguments.rollout, arguments.config
    assert (config.learning_rate, rollout.search_top_k, config.turn_ratio) == (1e-5, 7, "arithmetic")
    assert arguments.model.lora_r == 3


def test_another_source_of_passages_takes_the_place_of_the_recipes(tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").touch()
    words = ["--config", str(ROOT / "recipes/so_grpo.yaml"), "--train_questions", str(tmp_path / "questions.jsonl")]
    search = parse_arguments([*words, "--search_url", "http://127.0.0.1:8000/retrieve"]).search
    assert (search.search_url, search.corpus) == ("http://127.0.0.1:8000/retrieve", "")
    with pytest.raises(ValueError, match="got corpus, search_url"):
        parse(ROOT / "recipes/so_grpo.yaml", tmp_path, "--search_url", "http://127.0.0.1:8000/retrieve")


class TestTrainer:
    def test_so_grpo_is_the_default(self, tmp_path: Path) -> None:
        assert type(parse(ROOT / "recipes/grpo.yaml", tmp_path).config) is SOGRPOConfig

    def test_the_command_line_overrides_the_recipe(self, tmp_path: Path) -> None:
        overrides = ["--trainer", "so_ppo", "--gae_lambda", "0.5"]
        config = parse(ROOT / "recipes/grpo.yaml", tmp_path, *overrides).config
        assert isinstance(config, SOPPOConfig)
        assert config.gae_lambda == 0.5

    def test_the_others_fields_are_refused_on_the_command_line(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"^`--gae_lambda` is an argument of --trainer so_ppo alone"):
            parse(ROOT / "recipes/so_grpo.yaml", tmp_path, "--gae_lambda", "0.5")

    def test_the_others_fields_are_refused_in_a_recipe(self, tmp_path: Path) -> None:
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text((ROOT / "recipes/so_grpo.yaml").read_text() + "gae_lambda: 0.5\n")
        with pytest.raises(
            ValueError, match=r"^`gae_lambda` in .*recipe\.yaml is an argument of --trainer so_ppo alone"
        ):
            parse(recipe, tmp_path)

    @pytest.mark.parametrize(("trainer", "has_critic"), [("so_grpo", False), ("so_ppo", True)])
    def test_help_is_that_of_the_trainer(
        self, trainer: str, has_critic: bool, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as done:
            parse_arguments(["--trainer", trainer, "--help"])
        assert done.value.code == 0
        shown = capsys.readouterr().out
        assert all(name in shown for name in ("--trainer ", "--search_top_k ", "--turn_ratio ", "--lora_r "))
        assert ("--gae_lambda " in shown) == has_critic


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("--rewards", "accuracy", "exact_match"),
        ("--protocol", "xml", "search_r1"),
        ("--collapse_guard", "restart", "roll_back"),
        ("--trainer", "ppo", "so_ppo"),
        ("--train_questions", "nowhere.jsonl", "no such file"),
        ("--train_questions", "squad", "public set of this name (nq, "),
        ("--train_questions", "popqa", "these have one: nq, "),
        ("--eval_questions", "nowhere.jsonl", "no such file"),
        ("--prompt_template", "Answer:", "{question}"),
        ("--corpus", "nowhere.jsonl", "no such file"),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, name: str, value: str, allowed: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(ROOT / "recipes/so_grpo.yaml", tmp_path, name, value)
    assert name.removeprefix("--") in str(error.value)
    assert value in str(error.value)
    assert allowed in str(error.value)


def test_rewards_of_turns_need_the_turns_of_the_rollout(tmp_path: Path) -> None:
    turns = ["--turn_boundary", "tags", "--rewards", "exact_match", "turn_format"]
    with pytest.raises(ValueError, match="`rewards` has 'turn_format', one float per generation"):
        parse(ROOT / "recipes/so_grpo.yaml", tmp_path, *turns)
