"""`evaluate.py` as a user runs it: whole runs, killed runs, shared runs, adapters, comparisons."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from benchmarks.worlds.invented import Population, build_invented
from examples.quickstart import (
    LIMITS,
    NO_NOISE,
    PROMPT_TEMPLATE,
    PolicyConfig,
    WarmStartConfig,
    WorldSize,
    warm_start,
)
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, LlamaForCausalLM

from sorl_trl.cli import evaluate
from sorl_trl.qa import Question, write_questions
from sorl_trl.records.evaluated import read_evaluated, read_settings
from sorl_trl.search import BM25Index, RetryPolicy, SearchUnavailable
from tests.distributed.launch import CONFIGS, ENVIRONMENT, ROOT, run

POPULATION = Population(people=30, companies=8, cities=9, lands=4, first_names=8, last_names=9)
QUESTIONS = 12
LEARNER = WarmStartConfig(PolicyConfig(32, 1, 2), NO_NOISE, trajectories=60, steps=80, learning_rate=1e-2)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that has half learnt to search, the corpus with its index, and two files of questions."""
    folder = tmp_path_factory.mktemp("world")
    world = build_invented(0, POPULATION, WorldSize(train_questions=60, evaluation_questions=20))
    world.write(folder)
    BM25Index.build(folder / "corpus.jsonl", folder / "index", show_progress=False)
    shutil.copytree(warm_start(world, [world], folder / "cache", LEARNER), folder / "policy")
    write_questions(world.train[:QUESTIONS], folder / "own.jsonl")
    write_questions([Question("1", "which ?", ("Rome",), options={"A": "Oslo", "B": "Rome"})], folder / "choice.jsonl")
    return folder


SAMPLED = {"num_samples": 4, "temperature": 1.0}


def command_line(world: Path, output: Path, **changed: Any) -> list[str]:
    """The arguments of a run on one's own questions; `None` leaves one out."""
    arguments = {
        "model_name_or_path": world / "policy",
        "questions": world / "own.jsonl",
        "index": world / "index",
        "output": output,
        "prompt_template": PROMPT_TEMPLATE,
        "protocol": "terse",
        "max_turns": LIMITS.max_turns,
        "max_turn_tokens": LIMITS.max_turn_tokens,
        "max_observation_tokens": LIMITS.max_observation_tokens,
        "max_completion_length": LIMITS.max_trajectory_tokens,
        "search_top_k": LIMITS.top_k,
        "batch_size": 5,
        **changed,
    }
    return [word for name, value in arguments.items() if value is not None for word in (f"--{name}", str(value))]


def results(run: Path) -> dict[str, Any]:
    return json.loads((run / "results.json").read_text())


def trajectories(run: Path) -> list[dict[str, Any]]:
    """The rows of all datasets, in the order of the plan."""
    return [row for name in read_settings(run)["datasets"] for row in read_evaluated(run, name)]


def test_a_greedy_run_over_two_datasets(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = command_line(world, tmp_path, questions=None)
    evaluate.main([*words, "--questions", str(world / "choice.jsonl"), str(world / "own.jsonl")])
    found = results(tmp_path)
    assert list(found["datasets"]) == ["choice", "own"]
    assert [each["questions"] for each in found["datasets"].values()] == [1, QUESTIONS]
    assert "choice_accuracy" in found["datasets"]["choice"]["means"]
    assert "choice_accuracy" not in found["datasets"]["own"]["means"]
    rows = trajectories(tmp_path)
    assert len(rows) == 1 + QUESTIONS
    assert sum(found["datasets"]["own"]["stop_reasons"].values()) == pytest.approx(1)
    assert rows[-1]["prompt"] == PROMPT_TEMPLATE.format(question=rows[-1]["question"])
    assert 0 < found["datasets"]["own"]["means"]["exact_match"]["mean"] < 1, "nothing to see where all are alike"
    printed = capsys.readouterr()
    assert (tmp_path / "results.md").read_text() in printed.out
    assert f"{1 + QUESTIONS}/{1 + QUESTIONS}" in printed.err


KILLED = """
import itertools, os, signal, sys
import evaluate
from sorl_trl.records import evaluated

write, written = evaluated.pq.write_table, itertools.count()

def write_or_die(table, file, **options):
    if next(written) == 2:
        file.write(b"PAR1")
        os.kill(os.getpid(), signal.SIGKILL)
    write(table, file, **options)

evaluated.pq.write_table = write_or_die
evaluate.main(sys.argv[1:])
"""


def test_a_run_that_was_killed_goes_on(world: Path, tmp_path: Path) -> None:
    """SIGKILL while the third batch is written, then the same command again: as if nothing had happened."""
    sampled = {**SAMPLED, "num_samples": 2, "batch_size": 1, "limit": 3}
    words = command_line(world, tmp_path / "killed", **sampled)
    command = [sys.executable, "-c", KILLED, *words]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(trajectories(tmp_path / "killed")) == 2
    assert not (tmp_path / "killed/results.json").exists()
    for folder in ("killed", "straight"):
        evaluate.main(command_line(world, tmp_path / folder, **sampled))
    assert trajectories(tmp_path / "killed") == trajectories(tmp_path / "straight")
    assert (tmp_path / "killed/results.json").read_bytes() == (tmp_path / "straight/results.json").read_bytes()


def test_lost_trajectories_are_reported_and_repeated(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a mean over what is left would be taken for that of all."""
    words, search, calls = command_line(world, tmp_path / "run"), BM25Index.search_batch, count()

    def down_once(self: BM25Index, queries: Sequence[str], k: int) -> Any:
        if next(calls) == 1:
            raise SearchUnavailable("connection refused")
        return search(self, queries, k)

    monkeypatch.setattr("sorl_trl.rollout.search_responder.RetryPolicy", lambda: RetryPolicy(attempts=1))
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="trajectories were lost"):
        patch.setattr(BM25Index, "search_batch", down_once)
        evaluate.main(words)
    assert results(tmp_path / "run")["datasets"]["own"]["masked"] > 0
    evaluate.main(words)
    evaluate.main(command_line(world, tmp_path / "straight"))
    assert results(tmp_path / "run")["datasets"] == results(tmp_path / "straight")["datasets"]


@pytest.mark.distributed
def test_two_processes_make_the_run_of_one(world: Path, tmp_path: Path) -> None:
    for mode in ({}, SAMPLED):
        name = "sampled" if mode else "greedy"
        evaluate.main(command_line(world, tmp_path / name / "one", **mode))
        words = command_line(world, tmp_path / name / "two", **mode)
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / "ddp_cpu.yaml")]
        output = run([*launcher, "evaluate.py", *words], tmp_path / f"{name}.log", timeout_s=180.0)
        assert (tmp_path / name / "two/results.json").exists(), output[-3000:]
        # Of the batches of 5 the main process has every other one, and the bar shows its share.
        assert ("25/25" if mode else "7/7") in output
        assert trajectories(tmp_path / name / "two") == trajectories(tmp_path / name / "one")
        one, two = ((tmp_path / name / folder / "results.json").read_bytes() for folder in ("one", "two"))
        assert one == two


def test_an_adapter_is_put_upon_its_base_model(world: Path, tmp_path: Path) -> None:
    """An adapter that changes the output; its folder has no tokenizer, so the base model's is taken."""
    base = LlamaForCausalLM.from_pretrained(world / "policy")
    adapted = get_peft_model(
        base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_alpha=64, init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(world / "policy").save_pretrained(tmp_path / "merged")
    segments = {}
    for name, checkpoint in (("base", world / "policy"), *((n, tmp_path / n) for n in ("adapter", "merged"))):
        evaluate.main(command_line(world, tmp_path / f"run-{name}", model_name_or_path=checkpoint))
        segments[name] = [row["segments"] for row in trajectories(tmp_path / f"run-{name}")]
    assert segments["adapter"] == segments["merged"] != segments["base"]
