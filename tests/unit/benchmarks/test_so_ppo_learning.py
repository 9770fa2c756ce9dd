"""What the benchmark of learning trains, without training it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks import so_ppo_learning
from benchmarks.so_ppo_learning import CHANGES, METHODS, PRETRAINED, PRETRAINING, ROOT, logs_of, same_tokens

from sorl_trl.recipe import parse_arguments


def configured(changed: Sequence[str]) -> Any:
    recipe, *words = changed
    data = [word for name in ("train_questions", "corpus") for word in (f"--{name}", __file__)]  # any file that exists
    return parse_arguments(["--config", str(ROOT / f"recipes/{recipe}.yaml"), *data, *words]).config


@pytest.mark.parametrize("method", CHANGES)
def test_changes_are_options_of_the_recipe(method: str) -> None:
    config = configured(CHANGES[method])
    warm_up = {"so_ppo_head": 8, "so_ppo_warm_up": 64, "so_ppo_pretrained": 0}
    assert config.critic_warmup_steps == warm_up[method]


def test_the_policy_stands_still_in_the_critics_own_run() -> None:
    config = configured(PRETRAINING)
    assert config.critic_warmup_steps == config.max_steps > 0


def test_the_run_starts_from_the_pretrained_critic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[tuple[Sequence[str], Path]] = []

    def train(changed: Sequence[str], seed: int, world: Path, output: Path) -> list[dict[str, Any]]:
        trained.append((changed, output))
        return [{"step": len(trained)}]

    monkeypatch.setattr(so_ppo_learning, "train", train)
    logs = logs_of(PRETRAINED, 1, tmp_path / "world", tmp_path)
    assert logs == {"pretraining": [{"step": 1}], "log": [{"step": 2}]}
    (first, critic), (second, policy) = trained
    assert first == PRETRAINING and policy == tmp_path / "policy"
    assert second == [*CHANGES[PRETRAINED], "--critic_model_name_or_path", str(critic)]
    assert logs_of("before", 1, tmp_path, tmp_path) == {"log": []} and len(trained) == 2


def test_a_run_of_another_recipe_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(so_ppo_learning, "RUNS", tmp_path)
    for method in ("so_ppo", PRETRAINED, "before"):
        (tmp_path / f"{method}-11").mkdir()
        result = tmp_path / f"{method}-11/result.json"
        result.write_text(json.dumps({"settings": so_ppo_learning.settings_of(method)}))
        assert so_ppo_learning.is_done(method, 11) and not so_ppo_learning.is_done(method, 12)
        result.write_text(json.dumps({"settings": ["another recipe"]}))
        assert not so_ppo_learning.is_done(method, 11)
    assert "clip_normalization" in so_ppo_learning.settings_of("so_ppo")[0]


def test_pretraining_counts_in_a_row_of_its_own() -> None:
    def log(reward: float) -> list[dict[str, float]]:
        return [{"rollout/turns_per_trajectory": 1.0, "rollout/tokens_per_turn": 1.0, "reward": reward}] * 4

    results = [
        {"method": PRETRAINED, "log": log(0.8), "pretraining": log(0.2)},
        {"method": "so_grpo", "log": log(0.6)},
    ]
    text = same_tokens(results)
    name = METHODS[PRETRAINED]
    assert f"| {name} | 0.800 (+0.200" in text
    assert f"| {name}, its run counted | 0.200 (-0.400" in text
    assert "| SO-GRPO | 0.600 | 0.600 | 0.600 | 0.600 |" in text
