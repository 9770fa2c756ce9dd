"""VLLMGenerator against the contract of TRL's `VLLMGeneration.generate`; no engine runs here."""

from __future__ import annotations

from typing import Any

import pytest

from sorl_trl.trainers import vllm_generator
from sorl_trl.trainers.vllm_generator import VLLMGenerator


class Engine:
    """Takes and returns what TRL's wrapper does, and keeps the settings it was called with."""

    def __init__(self, completions: list[list[int]]) -> None:
        self.completions = completions
        self.max_completion_length = 99
        self.generation_kwargs = {"seed": 3}
        self.calls: list[Any] = []

    def generate(self, prompts: Any, images: Any, num_generations: int) -> Any:
        self.calls.append((prompts, self.max_completion_length, dict(self.generation_kwargs)))
        logprobs = [[[-0.5] for _ in ids] for ids in self.completions]
        return prompts, self.completions, logprobs, None


def test_one_turn() -> None:
    engine = Engine([[5, 6], [7, 8, 9]])
    generations = VLLMGenerator(engine, ["</search>"]).generate([(1, 2), (3,)], [4, 2])
    assert [g.token_ids for g in generations] == [(5, 6), (7, 8)]  # the second is cut at its own limit
    assert [g.stopped for g in generations] == [True, False]
    assert generations[1].logprobs == (-0.5, -0.5)
    stops = {"seed": 3, "stop": ["</search>"], "include_stop_str_in_output": True}
    assert engine.calls == [([[1, 2], [3]], 4, stops)]
    assert (engine.max_completion_length, engine.generation_kwargs) == (99, {"seed": 3})


def test_ranks_bring_equally_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank has three rows and a longer limit: ours are filled up with copies, whose results are dropped."""
    monkeypatch.setattr(vllm_generator, "gather_object", lambda sizes: [*sizes, (3, 8)])
    engine = Engine([[5], [6], [7]])
    generations = VLLMGenerator(engine, []).generate([(1, 2)], [4])
    assert [g.token_ids for g in generations] == [(5,)]
    assert engine.calls[0][:2] == ([[1, 2], [1, 2], [1, 2]], 8)


def test_settings_are_restored_after_a_failure() -> None:
    engine = Engine([])
    engine.generate = lambda **_: (_ for _ in ()).throw(RuntimeError("down"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="down"):
        VLLMGenerator(engine, []).generate([(1,)], [4])
    assert (engine.max_completion_length, engine.generation_kwargs) == (99, {"seed": 3})
