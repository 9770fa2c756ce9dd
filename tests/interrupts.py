"""`sorl train` in a process group of its own, which a test interrupts as a terminal does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.agents import LIMITS, NAMES, agent_policy, agent_tokenizer, search_index

ROOT = Path(__file__).parents[1]
SORL = [sys.executable, "-m", "sorl_trl.cli.main"]


def make_world(folder: Path) -> None:
    """A policy, questions and a corpus."""
    agent_policy().save_pretrained(folder / "policy")
    agent_tokenizer().save_pretrained(folder / "policy")
    search_index(folder)
    rows = [{"id": str(i), "question": NAMES[i % 4], "golden_answers": [NAMES[i % 4]]} for i in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def training_words(folder: Path, **changed: object) -> list[str]:
    """Of a run of single updates into `out`, which would last for hours; `None` leaves one out."""
    values = {
        "config": ROOT / "recipes/so_grpo.yaml",
        "model_name_or_path": folder / "policy",
        "train_questions": folder / "train.jsonl",
        "corpus": folder / "corpus.jsonl",
        "output_dir": folder / "out",
        "prompt_template": "where {question}",
        "max_turns": LIMITS.max_turns,
        "max_turn_tokens": LIMITS.max_turn_tokens,
        "max_observation_tokens": LIMITS.max_observation_tokens,
        "max_completion_length": LIMITS.max_trajectory_tokens,
        "per_device_train_batch_size": 8,
        "steps_per_generation": 1,
        "num_iterations": 1,
        "max_steps": 100_000,
        **changed,
    }
    return [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]


def interrupted(folder: Path, words: list[str], ready: Callable[[], bool], times: int = 1) -> tuple[int, str]:
    """Exit code and stderr of `sorl train`, interrupted once `ready`."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "DS_ACCELERATOR": "cpu"}
    with (folder / "out.txt").open("w") as out, (folder / "err.txt").open("w") as err:
        command = [*SORL, "train", *words]
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=err, start_new_session=True)
        try:
            while not ready():
                assert process.poll() is None, (folder / "err.txt").read_text()[-3000:]
                time.sleep(0.05)
            for _ in range(times):
                os.killpg(process.pid, signal.SIGINT)
            process.wait(60)
        finally:
            if process.poll() is None:
                process.kill()
    return process.returncode, (folder / "err.txt").read_text()
