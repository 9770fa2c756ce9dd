"""Rollouts of TRL's tool loop, with tools as a test gives them and a policy that follows a script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tools import build, following, lookup, numbered_rows, qwen_tokenizer, tool_call

TOGETHER = {"tool_concurrency": 4}
DONE = "Done."
PATIENCE_S = 20.0
"""Longer than any test that passes waits."""


def named(function: Any, name: str = "lookup") -> Any:
    function.__name__, function.__doc__ = name, lookup.__doc__
    function.__annotations__ = lookup.__annotations__
    return function


class Seen:
    """A reward function that keeps the messages it is given."""

    __name__ = "seen"

    def __init__(self) -> None:
        self.completions: list[list[dict[str, Any]]] = []

    def __call__(self, completions: Any, **_: Any) -> list[float]:
        self.completions = completions
        return [float(len(str(completion))) for completion in completions]

    def told(self, row: int) -> list[tuple[str, Any]]:
        return [(each["name"], each["content"]) for each in self.completions[row] if each["role"] == "tool"]


def prepare(
    folder: Path, script: Callable[[int, int], str], options: dict[str, Any], **native: Any
) -> tuple[Any, Seen]:
    seen = Seen()
    tokenizer = qwen_tokenizer()
    trainer = build(folder, tokenizer, seen, {"max_completion_length": 4096, **options}, **native)
    trainer.model.config.max_position_embeddings = 8192  # TRL drops results that do not fit
    trainer._generate_single_turn = following(tokenizer, script)
    return trainer, seen


def run(trainer: Any, rows: int = 4) -> tuple[dict[str, Any], dict[str, float]]:
    batch = trainer._generate_and_score_completions(numbered_rows(rows))
    return batch, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def once(*calls: str) -> Callable[[int, int], str]:
    """Every row makes these calls in its first message, and none after it."""
    return lambda row, turn: DONE if turn else "\n".join(calls)


def own_row(row: int, turn: int) -> str:
    return DONE if turn else tool_call("lookup", city=str(row))
