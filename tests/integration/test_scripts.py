"""Commands as a user runs them: `accelerate launch train.py`, `sorl train`, and the quickstart with few steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sorl_trl import load_critic
from sorl_trl.sandbox import Population, WorldSize, build_invented, make_policy, train_tokenizer
from sorl_trl.sandbox.policy import PolicyConfig
from sorl_trl.search import BM25Index

ROOT = Path(__file__).parents[2]
POPULATION = Population(people=30, companies=8, cities=9, lands=4, first_names=8, last_names=9)
SORL = ["-c", "import sys; from sorl_trl.cli.main import main; sys.exit(main())"]
LAUNCHER = ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/single_cpu.yaml", "train.py"]
LAUNCHES = {
    "so_grpo": (LAUNCHER, "recipes/so_grpo_lora.yaml"),
    "so_ppo": ([*SORL, "train", "--accelerate_config", "single_cpu"], "so_ppo_lora"),
}
"""Trainer -> how it is launched, and the recipe: once in the repository, once outside with names alone."""


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.parametrize("trainer", ["so_grpo", "so_ppo"])
def test_train_script(tmp_path: Path, trainer: str) -> None:
    """An untrained policy, LoRA, every reward: it leaves a plain adapter, the index and all metrics."""
    world = build_invented(0, POPULATION, WorldSize(train_questions=60, evaluation_questions=20))
    world.write(tmp_path)
    tokenizer = train_tokenizer([world])
    make_policy(tokenizer, PolicyConfig(16, 1, 2), seed=0).save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    launch, recipe = LAUNCHES[trainer]
    overrides = {
        "config": recipe,
        "model_name_or_path": str(tmp_path / "policy"),
        "train_questions": str(tmp_path / "train.jsonl"),
        "eval_questions": str(tmp_path / "eval.jsonl"),
        "eval_strategy": "steps",
        "eval_steps": "2",
        "corpus": str(tmp_path / "corpus.jsonl"),
        "output_dir": str(tmp_path / "out"),
        "max_steps": "2",
        "steps_per_generation": "1",
        "num_iterations": "2",
        "collapse_guard": "roll_back",
        "save_strategy": "steps",
    }
    rewards = ["--rewards", "exact_match", "f1", "format", "search_hit"]
    words = [word for name, value in overrides.items() for word in (f"--{name}", value)]
    run(*launch, *words, *rewards, cwd=ROOT if launch is LAUNCHER else tmp_path)
    assert {"adapter_config.json", "adapter_model.safetensors", "trainer_state.json"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    logs = json.loads((tmp_path / "out/trainer_state.json").read_text())["log_history"]
    assert "rewards/search_hit_turn_reward/mean" in logs[0]
    assert any("eval_turns/per_trajectory" in log for log in logs)
    assert (tmp_path / "out/critic").is_dir() == ("critic/value_loss" in logs[0]) == (trainer == "so_ppo")
    if trainer == "so_ppo":
        assert load_critic(tmp_path / "out").head.hidden_size == 16
    assert BM25Index.load(tmp_path / "corpus.jsonl.index").search_batch(["born"], 1)[0]


def test_quickstart(tmp_path: Path) -> None:
    done = run("quickstart.py", "--max-steps", "2", "--output", str(tmp_path / "run"))
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["world"] == "atlas"
    assert set(summary) == {"before", "after", "no_search", "guess_rate", "seconds", "world"}
    for part in ("before", "after", "no_search"):
        assert set(summary[part]) == {"sampled_em", "greedy_em", "f1", "by_hops"}
        assert set(summary[part]["by_hops"]) == {"1", "2"}
    assert summary["before"]["sampled_em"] > 0.15, "the warm start did not learn to search"
    assert summary["before"]["greedy_em"] > 0.6
    assert summary["no_search"]["greedy_em"] <= summary["guess_rate"]
    assert done.stdout.count("Question ") == 3
    assert (tmp_path / "run/curves.png").stat().st_size > 10_000
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "run/policy")
    assert policy.dtype == torch.float32
