"""The engine of TRL's tool loop: which row a context goes on from, when it is opened and closed, who polls when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from sorl_trl.rollout import Engine, Generation
from sorl_trl.trainers.agents import tool_engine
from sorl_trl.trainers.agents.tool_engine import ToolEngine

END = 9


class Scripted(Engine):
    """Writes a row's own number and the end, each poll one row, and keeps a log."""

    window = 12

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []
        self._waiting: list[int] = []

    def open(self, rows: int) -> None:
        self.log.append(("open", rows))

    def submit(self, row: int, context_ids: Sequence[int], limit: int) -> None:
        self.log.append((row, [*context_ids], limit))
        self._waiting.append(row)

    def poll(self) -> list[tuple[int, Generation]]:
        self.log.append("poll")
        return [(row, Generation((row, END), None, True)) for row in [self._waiting.pop()]] if self._waiting else []

    def release(self, row: int) -> None:
        self.log.append(("release", row))

    @property
    def idle(self) -> bool:
        return not self._waiting

    def close(self) -> None:
        self.log.append("close")


def not_asked(*args: Any) -> Any:
    raise AssertionError("TRL must not generate")


@pytest.fixture
def engine() -> Scripted:
    return Scripted()


@pytest.fixture
def others() -> list[bool]:
    """Whether another rank is active, question by question; then none is."""
    return []


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch, engine: Scripted, others: list[bool]) -> Any:
    @contextmanager
    def policy_engine(*_: Any) -> Iterator[tuple[Engine, Callable[[bool], bool]]]:
        yield engine, lambda active: (others.pop(0) if others else False) or active

    monkeypatch.setattr(tool_engine, "policy_engine", policy_engine)
    args = SimpleNamespace(tool_engine="auto", use_vllm=False, use_transformers_continuous_batching=False)
    return SimpleNamespace(
        args=args, tools=[str], rollout_func=None, use_vllm=False, _is_vlm=False, max_completion_length=6
    )


def test_rows_are_found_by_what_they_hold(trainer: Any, engine: Scripted) -> None:
    """Two rows are alike, and one has ended."""
    turns = ToolEngine(trainer)
    prompts = [[5], [6, 6], [5], [7]]
    first, logprobs = turns.generate(not_asked, prompts)
    assert (first, logprobs) == ([[0, END], [1, END], [2, END], [3, END]], None)
    engine.log.clear()
    second, _ = turns.generate(not_asked, [[6, 6, 1, END, 8], [5, 2, END, 8], [7, 3, END, 8, 8]])
    assert second == [[1, END], [2, END], [3, END]]
    assert engine.log[:4] == [
        ("release", 0), (1, [6, 6, 1, END, 8], 3), (2, [5, 2, END, 8], 3), (3, [7, 3, END, 8, 8], 2)
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match="goes on from none of its rows"):
        turns.generate(not_asked, [[5, 0, END, 8]])


def test_a_completion_without_room_gets_no_turn(trainer: Any, engine: Scripted) -> None:
    """TRL would generate one, and cut it to nothing."""
    turns = ToolEngine(trainer)
    turns.generate(not_asked, [[5], [6]])
    engine.log.clear()
    assert turns.generate(not_asked, [[5, 0, END, 8, 8, 8, 8], [6, 1, END, 8]])[0] == [[], [1, END]]
    assert engine.log == [(1, [6, 1, END, 8], 3), "poll"]


def test_the_window_ends_a_turn_and_refuses_a_prompt(trainer: Any, engine: Scripted) -> None:
    turns = ToolEngine(trainer)
    turns.generate(not_asked, [[5] * 11])
    assert engine.log[1] == (0, [5] * 11, 1)
    with pytest.raises(ValueError, match="A context of 12 tokens fills the model, which reads 12"):
        ToolEngine(trainer).generate(not_asked, [[5] * 12])


def test_ranks_poll_until_all_have_ended(trainer: Any, engine: Scripted, others: list[bool]) -> None:
    turns = ToolEngine(trainer)
    others += [True, False, True, True, False]  # two polls of our own, then two for the others

    def loop() -> str:
        turns.generate(not_asked, [[5], [6]])
        return "done"

    assert turns.closing(loop, together=True)() == "done"
    assert engine.log[-5:] == ["poll", "poll", "poll", "poll", "close"]


def test_a_failure_closes_and_polls_no_more(trainer: Any, engine: Scripted, others: list[bool]) -> None:
    turns = ToolEngine(trainer)
    others += [False, True, True]

    def loop() -> None:
        turns.generate(not_asked, [[5]])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        turns.closing(loop, together=True)()
    assert engine.log[-2:] == ["poll", "close"]
    turns.generate(not_asked, [[5]])
    assert engine.log.count(("open", 1)) == 2


@pytest.mark.parametrize(
    "without",
    [
        {"tools": []},
        {"rollout_func": str},
        {"_is_vlm": True},
        {"args": SimpleNamespace(tool_engine="trl", use_vllm=False, use_transformers_continuous_batching=False)},
        {"args": SimpleNamespace(tool_engine="auto", use_vllm=False, use_transformers_continuous_batching=True)},
    ],
)
def test_elsewhere_trl_generates(trainer: Any, engine: Scripted, without: dict[str, Any]) -> None:
    vars(trainer).update(without)
    turns = ToolEngine(trainer)
    asked = turns.closing(lambda: turns.generate(lambda *given: (given, "logprobs"), [[5]], "images"))()
    assert asked == (([[5]], "images"), "logprobs")
    assert not engine.log


class Sleeper:
    """TRL's `vllm_generation` with sleep mode, as far as it sleeps."""

    mode = "colocate"

    def __init__(self) -> None:
        self.log: list[str] = []
        self.enable_sleep_mode = True
        self._llm_weights_sleeping = True
        self.llm = self

    def sync_weights(self) -> None:
        self.log.append("sync")
        self._llm_weights_sleeping = False

    def wake_up(self, tags: list[str]) -> None:
        self.log.append(f"wake {tags[0]}")

    def sleep(self, level: int) -> None:
        self.log.append("sleep")


@pytest.mark.parametrize(("last_loaded_step", "fails"), [(3, False), (2, False), (3, True)])
def test_vllm_is_woken_once(trainer: Any, last_loaded_step: int, fails: bool) -> None:
    """With a new policy it is sent the weights as TRL sends them, and not twice."""
    vllm = Sleeper()
    vars(trainer).update(
        use_vllm=True, vllm_generation=vllm, state=SimpleNamespace(global_step=3), _last_loaded_step=last_loaded_step
    )
    turns = ToolEngine(trainer)

    def of_trl(prompt_ids: Any) -> Any:
        assert trainer._last_loaded_step == 3, "TRL would send the weights"
        assert not vllm.enable_sleep_mode, "TRL would put it to sleep"
        vllm.log.append("generate")
        return prompt_ids, None

    def loop() -> None:
        turns.generate(of_trl, [[5]])
        turns.generate(of_trl, [[5, 8]])
        if fails:
            raise RuntimeError("down")

    with pytest.raises(RuntimeError, match="down") if fails else nullcontext():
        turns.closing(loop, together=True)()
    assert vllm.log == ["sync", "wake kv_cache", "generate", "generate", "sleep"]
    assert (vllm.enable_sleep_mode, vllm._llm_weights_sleeping) == (True, True)
