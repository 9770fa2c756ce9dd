"""What the documentation shows: its pages, their blocks of code, and a folder in which the Python among them runs."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sorl_trl
from tests.agents import agent_policy, agent_tokenizer
from tests.policies import CHAT

ROOT = Path(__file__).parents[1]
SITE = sorted(path for path in (ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "recipes" / "README.md", *SITE]
MODELS = ("Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B")


def page_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def code_blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of a page in that language, also those within a list."""
    fences = re.findall(rf"^( *)```{language}\n(.*?)^\1```", path.read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for _, block in fences]


def small(config_class: type[Any]) -> Callable[..., Any]:
    """`config_class` with what a test needs: the CPU and one short step."""

    def config(output_dir: str, **fields: Any) -> Any:
        fields |= {"max_steps": 1, "per_device_train_batch_size": 4, "report_to": "none"}
        if hasattr(config_class, "num_generations"):
            fields["num_generations"] = 4
        if fields.get("max_completion_length") == 2500:  # which the tiny policy would fill at random
            fields["max_completion_length"] = 48
        return config_class(output_dir, use_cpu=True, bf16=False, **fields)

    return config


def write_questions() -> None:
    """`questions.jsonl` and `corpus.jsonl`, here."""
    corpus = [{"id": "0", "title": "Oslo", "text": "where oslo"}]
    questions = [{"id": str(i), "question": "where oslo", "golden_answers": ["oslo"]} for i in range(8)]
    for name, rows in (("corpus", corpus), ("questions", questions)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def logged(trainer: Any, metric: str) -> float:
    """What a trainer has logged once."""
    (value,) = [entry[metric] for entry in trainer.state.log_history if metric in entry]
    return float(value)


def set_stage(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Go to a folder with a tiny policy, a corpus and questions, and make what the pages configure small."""
    monkeypatch.chdir(folder)
    agent_policy().save_pretrained("policy")
    tokenizer: Any = agent_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained("policy")
    write_questions()
    for name in ("SOGRPOConfig", "SOPPOConfig"):
        monkeypatch.setattr(sorl_trl.trainers, name, small(getattr(sorl_trl, name)))


def run_blocks(path: Path, policy: str = "policy", **given: Any) -> dict[str, Any]:
    """Run a page's Python from top to bottom, with `policy` for its models and names it takes as given; its names."""
    names: dict[str, Any] = {"__name__": __name__, **given}  # a module that exists, for dataclasses
    for block in code_blocks(path, "python"):
        for model in MODELS:
            block = block.replace(model, policy)
        exec(compile(block, page_name(path), "exec"), names)
    return names
