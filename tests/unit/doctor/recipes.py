"""A small recipe that nothing is wrong with, and ways to break it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PreTrainedTokenizerFast

from sorl_trl.doctor import Finding, examine
from tests.agents import NAMES, agent_tokenizer

QUESTIONS = [{"id": f"q{i}", "question": f"where {NAMES[i % 4]}", "golden_answers": [NAMES[i % 4]]} for i in range(8)]


def write_model(folder: Path, tokenizer: PreTrainedTokenizerFast | None = None, **changed: Any) -> Path:
    """Configuration and tokenizer: the doctor needs no weights."""
    tokenizer = tokenizer or agent_tokenizer()
    settings = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaConfig(**{**settings, "max_position_embeddings": 64, **changed}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_recipe(folder: Path, **changed: Any) -> Path:
    """One argument per line; `None` takes one out."""
    if not (folder / "model").exists():
        write_model(folder / "model")
    corpus = [{"id": name, "title": name, "content": f"where {name}"} for name in NAMES[:4]]
    values = {
        "model_name_or_path": str(folder / "model"),
        "train_questions": str(write_rows(folder / "train.jsonl", QUESTIONS)),
        "corpus": str(write_rows(folder / "corpus.jsonl", corpus)),
        "output_dir": str(folder / "out"),
        "prompt_template": "question {question}",
        "protocol": "terse",
        "max_turns": 2,
        "max_turn_tokens": 6,
        "max_observation_tokens": 6,
        "max_completion_length": 30,
        "search_top_k": 1,
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "steps_per_generation": 2,
        "use_cpu": True,
        "bf16": False,
        "logging_steps": 1,
        "report_to": "none",
        **changed,
    }
    recipe = folder / "recipe.yaml"
    lines = [f"{name}: {json.dumps(value)}\n" for name, value in values.items() if value is not None]
    recipe.write_text("# A recipe\n" + "".join(lines))
    return recipe


def line_of(recipe: Path, name: str) -> str:
    """What a finding about an argument of the recipe says of its place."""
    numbers = [i for i, line in enumerate(recipe.read_text().splitlines(), start=1) if line.startswith(f"{name}:")]
    return f"({recipe} line {numbers[-1]})"


def complaints(recipe: Path, *words: str, num_processes: int = 1) -> list[Finding]:
    """What the doctor finds wrong."""
    found = examine(str(recipe), words, num_processes)
    return [finding for finding in found if finding.level in ("error", "warning")]


def the_complaint(recipe: Path, *words: str, num_processes: int = 1) -> Finding:
    """The only thing that the doctor finds wrong."""
    found = complaints(recipe, *words, num_processes=num_processes)
    assert len(found) == 1, found
    return found[0]
