from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sorl_trl.experimental.agents import AgentEngine
from sorl_trl.rollout import Generation, SlotEngine, TurnEnd
from tests.policies import WORDS, build_policy, word_tokenizer
from tests.unit.rollout.fakes import SteppingEngine

NOW: list[str] = []
"""Whose weights the model has."""


@contextmanager
def active(agent: str) -> Iterator[None]:
    NOW.append(agent)
    yield
    NOW.pop()


class Listening(SteppingEngine):
    """Remembers whose weights it was polled with."""

    def __init__(self, window: int | None) -> None:
        super().__init__(["Paris of France"])
        self.window, self.polled = window, list[list[str]]()

    def poll(self) -> list[tuple[int, Generation]]:
        self.polled.append([*NOW])
        return super().poll()


def team() -> tuple[AgentEngine, Listening, Listening]:
    planner, searcher = Listening(9), Listening(7)
    return AgentEngine({"planner": planner, "searcher": searcher}, active), planner, searcher


def test_each_agents_turns_are_sampled_with_its_weights() -> None:
    engine, planner, searcher = team()
    engine.open(3)
    assert engine.window == 7
    engine.of_agent("planner").submit(0, [5, 6], 2)
    engine.of_agent("searcher").submit(1, [5, 6], 1)
    assert [row for row, _ in engine.poll()] == [1]
    engine.release(1)
    assert not engine.idle
    assert [row for row, _ in engine.poll()] == [0]
    assert engine.idle
    assert (planner.polled, searcher.polled) == ([["planner"]] * 2, [["searcher"]])
    assert planner.released == searcher.released == [1]
    engine.close()
    assert not planner.is_open and not searcher.is_open


def test_an_agent_without_weights_is_refused() -> None:
    engine, *_ = team()
    engine.open(1)
    with pytest.raises(ValueError, match=r"'writer', but `agents` are \['planner', 'searcher'\]"):
        engine.of_agent("writer")
    with pytest.raises(ValueError, match="agent ''"):
        engine.submit(0, [5], 1)


def test_agents_share_the_memory() -> None:
    end, policy = TurnEnd(word_tokenizer(WORDS), (), [1]), build_policy()
    alone, *slots = (SlotEngine(policy, end, policy.generation_config, cache_bytes=64_000) for _ in range(3))
    engine = AgentEngine({"planner": slots[0], "searcher": slots[1]}, active)
    for each in (engine, alone):
        each.open(1)
    assert engine.window == slots[0].window == slots[1].window == (alone.window + 1) // 2
