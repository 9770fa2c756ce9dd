"""`sorl train` in a process group of its own, which a test interrupts as a terminal does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.agents import LIMITS, NAMES, agent_policy, agent_tokenizer, search_index

ROOT = Path(__file__).parents[1]
SORL = [sys.executable, "-c", "import sys; from sorl_trl.cli.main import main; sys.exit(main())"]


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
