"""Calls that are made at the same time, sent again, or given up."""

from __future__ import annotations

import asyncio
import threading
from itertools import count
from typing import Any

import openai
import pytest

from sorl_trl.endpoint import Access, run
from tests.endpoint import END, ScriptedEngine, ask, ask_sdk, collect
from tests.tools import qwen_tokenizer

TOKENIZER = qwen_tokenizer()


def test_calls_at_the_same_time_are_turns_of_their_own() -> None:
    async def agent(example: Any, endpoint: Access) -> dict[str, float]:
        await asyncio.gather(
            *(ask(endpoint, f"sub {i}") for i in range(3)), *(ask(endpoint, "vote") for _ in range(3))
        )
        await ask(endpoint, "vote")
        return {"calls": 7.0}

    output, metrics, engine = collect(agent, 2)
    assert [len(each.turns) for each in output["trajectory"]] == [7, 7]
    assert sorted({row for row, _ in engine.asked}) == [*range(14)]
    assert (metrics["endpoint/new_context"], metrics["endpoint/resent"]) == (6.0, 0.0)
    assert metrics["agent/calls"] == 7.0


def test_a_request_that_is_sent_again_is_one_turn() -> None:
    begun = threading.Event()

    def script(row: int, ids: list[int]) -> str | None:
        return f"Hello.{END}" if begun.wait(0.02) else None

    def agent(example: Any, endpoint: Access) -> float:
        threading.Timer(1.5, begun.set).start()
        return float(ask_sdk(endpoint, "hi", timeout=0.5, max_retries=8).choices[0].message.content == "Hello.")

    output, metrics, engine = collect(agent, 1, script)
    assert (output["agent_rewards"], len(engine.asked)) == ([{"reward": 1.0}], 1)
    assert metrics["endpoint/resent"] >= 1


def test_a_retry_gets_the_turn_whose_answer_was_lost() -> None:
    turn, found = count(), list[str]()

    async def agent(example: Any, endpoint: Access) -> None:
        found.extend([await ask(endpoint, "hi", retries=retries) for retries in (0, 1, 0, 2)])

    output, metrics, _ = collect(agent, 1, lambda row, ids: f"{next(turn)}{END}")
    assert (found, len(output["trajectory"][0].turns)) == (["0", "0", "1", "1"], 2)
    assert metrics["endpoint/resent"] == 2


def test_a_turn_that_nobody_received_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client has gone before it was sampled, and does not ask again."""
    has_gone = threading.Event()

    def agent(example: Any, endpoint: Access) -> float:
        with pytest.raises(openai.APITimeoutError):
            ask_sdk(endpoint, "hi", timeout=0.5, max_retries=0)
        has_gone.set()
        return float(ask_sdk(endpoint, "again").choices[0].message.content == "again")

    def script(row: int, ids: list[int]) -> str | None:
        if "again" in TOKENIZER.decode(ids):
            return f"again{END}"
        return f"Unseen.{END}" if has_gone.is_set() else None

    output, *_ = collect(agent, 1, script)
    assert [turn.text for turn in output["trajectory"][0].turns] == [f"again{END}"]


def test_calls_at_the_same_time_share_what_a_trajectory_may_have() -> None:
    async def agent(example: Any, endpoint: Access) -> float:
        calls = [ask(endpoint, f"sub {i}") for i in range(4)]
        await asyncio.gather(*calls, return_exceptions=True)
        return 1.0

    output, *_ = collect(agent, 1, lambda row, ids: "x" * 100, turn=100, trajectory=150)
    assert 100 <= sum(len(turn.token_ids) for turn in output["trajectory"][0].turns) <= 150


def test_a_call_that_nobody_waits_for_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_GRACE_S", 0.05)
    sampled, dropped = threading.Event(), threading.Event()

    async def agent(example: Any, endpoint: Access) -> float:
        slow = asyncio.ensure_future(ask(endpoint, "slow"))
        await asyncio.to_thread(sampled.wait, 60)
        slow.cancel()
        await asyncio.to_thread(dropped.wait, 60)
        return float(await ask(endpoint, "fast") == "Fast.")

    class Watched(ScriptedEngine):
        def release(self, row: int) -> None:
            super().release(row)
            dropped.set()

    def script(row: int, ids: list[int]) -> str | None:
        if "slow" not in TOKENIZER.decode(ids):
            return f"Fast.{END}"
        sampled.set()
        return None

    engine = Watched(script, TOKENIZER)
    output, metrics, _ = collect(agent, 1, engine=engine)
    (trajectory,) = output["trajectory"]
    assert (output["agent_rewards"], len(trajectory.turns)) == ([{"reward": 1.0}], 1)
    assert "slow" not in TOKENIZER.decode(output["prompt_ids"][0])
    assert metrics["endpoint/new_context"] == 0 and engine.released[0] == 0


def test_a_call_ends_with_its_trajectory() -> None:
    """Although the rollout continues: the other agent's turn ends once the call has been refused."""
    sampled, refused = threading.Event(), threading.Event()
    left_alone = list[asyncio.Future[str]]()

    async def agent(example: dict[str, Any], endpoint: Access) -> float:
        call = asyncio.ensure_future(ask(endpoint, "hi"))
        if example["i"]:
            return float(await call == "Hello.")
        left_alone.append(call)
        call.add_done_callback(lambda call: refused.set() if "403" in str(call.exception()) else None)
        return float(await asyncio.to_thread(sampled.wait, 60))

    def script(row: int, ids: list[int]) -> str | None:
        if row == 0:
            sampled.set()
        return f"Hello.{END}" if refused.is_set() else None

    output, *_ = collect(agent, 2, script, time_limit_s=60.0)
    assert output["agent_rewards"][1] == {"reward": 1.0}
