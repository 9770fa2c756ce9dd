"""Commands as a user runs them: `accelerate launch train.py`, `sorl train`, and the quickstart with few steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.quickstart import PolicyConfig, demo, make_policy, train_tokenizer
from transformers import AutoModelForCausalLM

from sorl_trl.cli.main import main
from sorl_trl.records.evaluated import read_settings
from sorl_trl.search import BM25Index
from tests.worlds import build_world, taught_policy

ROOT = Path(__file__).parents[2]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def command_line(folder: Path) -> list[str]:
    """Two steps of the recipe for LoRA on an untrained policy, with every reward."""
    world = build_world(0, 60, 20)
    world.write(folder)
    tokenizer = train_tokenizer([world])
    make_policy(tokenizer, PolicyConfig(16, 1, 2), seed=0).save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    overrides = {
        "config": "so_grpo_lora",
        "model_name_or_path": str(folder / "policy"),
        "train_questions": str(folder / "train.jsonl"),
        "eval_questions": str(folder / "eval.jsonl"),
        "eval_strategy": "steps",
        "eval_steps": "2",
        "corpus": str(folder / "corpus.jsonl"),
        "output_dir": str(folder / "out"),
        "max_steps": "2",
        "steps_per_generation": "1",
        "num_iterations": "2",
        "collapse_guard": "stop",
        "save_strategy": "steps",
    }
    rewards = ["--rewards", "exact_match", "f1", "examples.own_reward.found_answer"]
    return [*(word for name, value in overrides.items() for word in (f"--{name}", value)), *rewards]


def test_train_script(tmp_path: Path) -> None:
    """It leaves a plain adapter, the index and all metrics, which are all that other commands need."""
    launch = ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/single_cpu.yaml", "train.py"]
    run(*launch, *command_line(tmp_path))
    out = tmp_path / "out"
    names = {path.name for path in out.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "recipe.yaml"} <= names and "critic" not in names
    logs = json.loads((out / "trainer_state.json").read_text())["log_history"]
    assert "rewards/found_answer/mean" in logs[0] and "critic/value_loss" not in logs[0]
    assert any("eval_turns/per_trajectory" in log for log in logs)
    assert BM25Index.load(tmp_path / "corpus.jsonl.index").search_batch(["born"], 1)[0]
    assert_read_by_other_commands(out)


def assert_read_by_other_commands(out: Path) -> None:
    """What training wrote is all that they need; so are its checkpoints, and the evaluation takes its questions."""
    for policy in (out, out / "checkpoint-2"):
        sorl("evaluate", policy)
        settings = read_settings(policy / "evaluation")
        assert settings["datasets"]["eval"]["questions"] == 20
        assert settings["rollout"]["protocol"] == "terse"
    sorl("compare", out, out / "checkpoint-2")
    sorl("view", out, "-o", out / "page.html")
    assert (out / "page.html").read_text().count('"key":"eval/') == 20


def sorl(*words: str | Path) -> None:
    assert main([str(word) for word in words]) == 0, words


def assert_summed_up(folder: Path, world: str) -> Any:
    """The summary, whose figures of a policy that is hardly trained are as they must be."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["world"] == world
    assert set(summary) == {"before", "after", "no_search", "guess_rate", "seconds", "world"}
    for part in ("before", "after", "no_search"):
        assert {"sampled_em", "greedy_em", "greedy_searches", "greedy_em_of_2_hops"} <= {*summary[part]}
    assert summary["before"]["sampled_em"] > 0.15, "the warm start did not learn to search"
    assert summary["no_search"]["greedy_em"] <= summary["guess_rate"]
    policy = AutoModelForCausalLM.from_pretrained(folder / "policy")
    assert policy.dtype == torch.float32
    return summary


def test_quickstart_in_a_small_world(
    tmp_path: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that it does, and training in a process of its own, but for the size of world and policy."""

    monkeypatch.setattr(demo, "build_worlds", lambda seed, course: (build_world(seed, 200, 40), []))
    monkeypatch.setattr(demo, "warm_start", lambda *worlds: taught_policy(1, shared_cache))
    demo.main(["--max_steps", "2", "--output", str(tmp_path / "run")])
    assert assert_summed_up(tmp_path / "run", "invented")["before"]["greedy_em"] > 0.6
    assert capsys.readouterr().out.count("after RL: ") == 1
