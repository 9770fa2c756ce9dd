"""Agents in threads, loops and processes of their own, and what becomes of those that fail, hang or leave."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import runpy
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.request import Request, urlopen

import httpx2
import openai
import pytest

from sorl_trl import agent_reward
from sorl_trl.endpoint import Access, EndpointRollout, agents
from sorl_trl.endpoint.agents import AgentMistake
from sorl_trl.endpoint.conversation import Conversation
from sorl_trl.rollout import EngineOptions, turns
from sorl_trl.trainers.returned import read_output
from sorl_trl.types import StopReason
from tests.endpoint import END, HTTP, ScriptedEngine, ask, ask_sdk, collect, end_time_limits, setup_of
from tests.tools import qwen_tokenizer

TOKENIZER = qwen_tokenizer()


def reasons(output: dict[str, Any]) -> list[StopReason]:
    return [each.stop_reason for each in output["trajectory"]]


def echo(row: int, ids: list[int]) -> str:
    return f"I heard {re.findall(r'mark[0-9]+x', TOKENIZER.decode(ids))[-1]}.{END}"


async def marked(example: dict[str, Any], endpoint: Access) -> float:
    texts = [f"mark{example['i']}x"]
    for _ in range(3):
        texts += [await ask(endpoint, *texts, model=f"role{len(texts) % 4}"), f"again mark{example['i']}x"]
    return float(all(f"mark{example['i']}x" in text for text in texts))


def post(endpoint: Access, text: str, path: str = "chat/completions", **fields: Any) -> str:
    """A call out of a thread, without an SDK."""
    body = json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    return urlopen(Request(f"{endpoint.base_url}/{path}", body, headers), timeout=60).read().decode()


def marked_in_a_thread(example: dict[str, Any], endpoint: Access) -> float:
    return float(f"mark{example['i']}x" in post(endpoint, f"mark{example['i']}x"))


@pytest.mark.parametrize(("agent", "size"), [(marked, 64), (marked_in_a_thread, 200)])
def test_agents_never_mix(agent: Any, size: int) -> None:
    output, _, engine = collect(agent, size, echo)
    assert output["agent_rewards"] == [{"reward": 1.0}] * size
    for number, row in enumerate(read_output(output, size)):
        text = TOKENIZER.decode([*row.prompt_ids, *row.completion_ids])
        assert {*re.findall(r"mark[0-9]+x", text)} == {f"mark{number}x"}
        assert [row.read_before(start) for start, _ in row.spans] == [ids for at, ids in engine.asked if at == number]
    assert len(engine.asked) == size * (3 if agent is marked else 1)
    assert output["agents"] == [["role1", "role3", "role1"] if agent is marked else ["policy"]] * size


def sampling_for(polls: int) -> Any:
    """A script whose turns take some polls each, more in some rows than in others."""
    seen: dict[tuple[int, int], int] = {}

    def script(row: int, ids: list[int]) -> str | None:
        seen[row, len(ids)] = seen.get((row, len(ids)), 0) + 1
        return f"Hello.{END}" if seen[row, len(ids)] > polls + row % 3 else None

    return script


def test_what_is_sampled_does_not_depend_on_how_long_tools_take() -> None:
    def trace(seed: int) -> list[tuple[int, ...]]:
        rng = random.Random(seed)

        async def agent(example: dict[str, Any], endpoint: Access) -> None:
            texts = ["hi"]
            for _ in range(3):
                await asyncio.sleep(rng.random() / 30)
                texts += [await ask(endpoint, *texts), "more"]

        rollout = EndpointRollout(agent, engine=EngineOptions(rejoin_after=2))
        engine = collect(rollout, 5, sampling_for(2))[2]
        return [each for each in engine.polled if each]

    assert trace(1) == trace(2) == trace(3)
    # Turns of rows 0 and 3 take 3 polls, of 1 and 4 take 4, of 2 takes 5. Rows rejoin after two polls without them.
    assert trace(1)[:7] == [(0, 1, 2, 3, 4)] * 3 + [(1, 2, 4), (2,), (0, 3), (0, 1, 3, 4)]


def test_agents_may_wait_for_each_other(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(turns.ApiTurns, "patience_s", 0.2)
    monkeypatch.setattr(turns, "_CHECK_S", 0.02)
    one_at_a_time, waits = asyncio.Semaphore(1), []

    async def agent(example: dict[str, Any], endpoint: Access) -> float:
        async with one_at_a_time:
            await ask(endpoint, "hi", await ask(endpoint, "hi"), "more")
        return 1.0

    def any_active(active: bool) -> bool:
        waits.append(active)
        return active

    engine = ScriptedEngine(sampling_for(40), TOKENIZER)
    rollout = EndpointRollout(agent)
    found, _ = rollout.collect(setup_of(TOKENIZER), ["hi"] * 6, [{}] * 6, engine, any_active)
    assert [each.columns["agent_rewards"] for each in found] == [{"reward": 1.0}] * 6
    assert caplog.text.count("the others continue") == 1
    assert len(waits) < 1.5 * len(engine.polled), "it does not wait for the same agents at every step"


def test_progress_is_told_until_all_agents_have_ended() -> None:
    told: list[tuple[int, float]] = []
    setup = replace(setup_of(TOKENIZER), progress=lambda *now: told.append(now))

    async def agent(example: dict[str, Any], endpoint: Access) -> None:
        texts = ["hi"]
        for _ in range(1 + example["i"]):
            texts += [await ask(endpoint, *texts), "more"]

    engine = ScriptedEngine(sampling_for(2), TOKENIZER)
    EndpointRollout(agent).collect(setup, ["hi"] * 4, [{"i": i} for i in range(4)], engine)
    ended = [each for each, _ in told]
    assert ended == sorted(ended) and ended[0] == 0 and ended[-1] == 4
    assert told[-1][1] > 0


ROWS = {0, 1}
"""Of agents that hang."""


async def hangs(example: Any, endpoint: Access) -> None:
    await ask(endpoint, "hi")
    example["hanging"].add(example["i"])
    await asyncio.sleep(600)


async def does_not_obey(example: Any, endpoint: Access) -> None:
    await ask(endpoint, "hi")
    example["hanging"].add(example["i"])
    for _ in range(600):
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            continue


def hangs_in_a_thread(example: Any, endpoint: Access) -> None:
    ask_sdk(endpoint, "hi")
    example["hanging"].add(example["i"])
    time.sleep(600)


@pytest.mark.parametrize("agent", [hangs, does_not_obey, hangs_in_a_thread])
def test_the_time_limit_masks_a_trajectory(
    agent: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hanging: set[int] = set()
    end_time_limits(monkeypatch, lambda: hanging == ROWS)
    output, metrics, _ = collect(agent, [{"i": i, "hanging": hanging} for i in ROWS])
    assert reasons(output) == [StopReason.ENVIRONMENT_UNAVAILABLE] * 2
    assert [sum(mask) for mask in output["env_mask"]] == [0, 0]
    assert [len(each.turns) for each in output["trajectory"]] == [1, 1]
    assert agent_reward([None] * 2, **output) == [None, None]
    assert (metrics["rollout/masked_share"], metrics["endpoint/error_share"]) == (1.0, 0.0)
    assert "2 of 2 agents" in caplog.text and "No agent returned a reward" not in caplog.text


@pytest.mark.parametrize("failure", ["poll", "length"])
def test_a_failing_engine_raises_in_the_trainer_and_ends_the_agents(failure: str) -> None:
    has_ended = threading.Event()

    async def agent(example: Any, endpoint: Access) -> None:
        try:
            with suppress(RuntimeError):
                await ask(endpoint, "hi")
            await asyncio.sleep(600)
        finally:
            has_ended.set()

    class Broken(ScriptedEngine):
        def poll(self) -> Any:
            if failure == "poll":
                raise OSError("the engine is gone")
            return [(row, self._cut([1] * 600, 600, ())) for row in self.submitted]

    with pytest.raises(OSError if failure == "poll" else RuntimeError, match=r"is gone|has 600 tokens"):
        collect(agent, 1, engine=Broken(lambda *_: "", TOKENIZER))
    assert has_ended.wait(60)


def test_an_error_that_comes_too_late_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    is_over, used = threading.Event(), []

    def agent(example: Any, endpoint: Access) -> None:
        used.append(threading.current_thread())
        is_over.wait(60)
        raise KeyError("nobody waits for it")

    collect(agent, 1, time_limit_s=0.1)
    is_over.set()
    used[0].join(60)
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), agents._loop()).result()
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_all_threads_share_an_event_loop() -> None:
    both = threading.Barrier(2)

    def loop_of(functions: dict[str, Any]) -> Any:
        both.wait(60)
        return functions["_loop"]()

    for _ in range(5):
        anew = runpy.run_path(str(agents.__file__))  # without a loop as yet
        with ThreadPoolExecutor(2) as threads:
            assert len({*threads.map(loop_of, [anew] * 2)}) == 1


async def fails(example: dict[str, Any], endpoint: Access) -> Any:
    kind = example["kind"]
    if kind == "early":
        raise KeyError("a mistake")
    if kind == "unreachable":
        await HTTP.get("http://127.0.0.1:9/")
    if kind == "never":
        return 0.5
    await ask(endpoint, "hi")
    if kind == "exit":
        sys.exit(1)
    if kind == "loop":
        try:
            await asyncio.new_event_loop().create_future()
        except RuntimeError as error:
            raise openai.APIConnectionError(request=httpx2.Request("GET", "http://x")) from error
    if kind == "cancelled":
        raise asyncio.CancelledError
    if kind == "lost":
        try:
            await HTTP.get("http://127.0.0.1:9/")
        except httpx2.ConnectError as error:
            raise openai.APIConnectionError(request=error.request) from error
    if kind == "named":
        return {"answer": 1, "length": -0.5}
    return {"late": float("nan"), "text": "1"}.get(kind, None if kind == "none" else 1.0)


def test_what_an_agents_end_means_for_its_trajectory(caplog: pytest.LogCaptureFixture) -> None:
    kinds = ["never", "exit", "cancelled", "lost", "named", "none"]
    rollout = EndpointRollout(fails, reward_on_error=-1.0)
    output, metrics, _ = collect(rollout, [{"kind": kind} for kind in kinds])
    done, error, lost = StopReason.ENVIRONMENT_DONE, StopReason.AGENT_ERROR, StopReason.ENVIRONMENT_UNAVAILABLE
    assert reasons(output) == [StopReason.NO_CALL, error, error, lost, done, done]
    assert agent_reward(kinds, output["agent_rewards"]) == [None, -1.0, -1.0, None, 0.5, None]
    assert [sum(mask) for mask in output["env_mask"]] == [0, 7, 7, 0, 7, 7]
    assert output["completion_ids"][0] == [TOKENIZER.eos_token_id]
    assert rollout.measures(4) == {"answer": 1.0, "length": -0.5, "reward": 0.5}
    assert (rollout.measures(0), rollout.measures(1), rollout.measures(3)) == ({}, {"reward": -1.0}, {})
    assert {name: value for name, value in metrics.items() if name.startswith("agent/")} == {
        "agent/answer": 1.0,
        "agent/length": -0.5,
    }
    assert (metrics["endpoint/error_share"], metrics["endpoint/uncalled_share"]) == (2 / 6, 1 / 6)
    assert "2 of 6 agents raised an error" in caplog.text
    assert "`dspy.LM(cache=False)`" in caplog.text
    assert caplog.text.count("ConnectError") == 1
    assert collect(rollout, [{"kind": "none"}])[0]["agent_rewards"] == [None], "the loop of all agents goes on"


@pytest.mark.parametrize("kind", ["late", "text"])
def test_a_return_value_that_is_no_reward_is_raised(kind: str) -> None:
    with pytest.raises(AgentMistake, match="must return a finite number"):
        collect(fails, [{"kind": "none"}, {"kind": kind}])
    with pytest.raises(ValueError, match="EndpointRollout"):
        agent_reward(["x"])


@pytest.mark.parametrize(("mistake", "named"), [("request", "`n`"), ("defect", "TypeError"), ("reward", "a text")])
def test_nothing_is_waited_for_after_a_mistake(mistake: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over, has_ended = threading.Event(), threading.Event()

    def agent(example: Any, endpoint: Access) -> Any:
        if example["i"]:
            is_over.wait(30)
            has_ended.set()
            return None
        if mistake != "reward":
            post(endpoint, "hi", n=200 if mistake == "request" else 1)
        return "a text"

    if mistake == "defect":
        monkeypatch.setattr(Conversation, "begin", None)
    with pytest.raises(RuntimeError, match=named):
        collect(agent, 2)
    assert not has_ended.is_set()
    is_over.set()


def test_a_path_that_is_not_served_is_the_agents_mistake() -> None:
    def agent(example: Any, endpoint: Access) -> None:
        post(endpoint, "hi")
        post(endpoint, "hi", "embeddings")

    with pytest.raises(ValueError, match="/v1/embeddings is not supported"):
        collect(agent)


def test_a_body_that_nests_too_deeply_costs_its_trajectory() -> None:
    def agent(example: Any, endpoint: Access) -> float:
        post(endpoint, "hi")
        if not example["i"]:
            post(endpoint, "hi", tools=json.loads("[" * 200 + "]" * 200))
        return 1.0

    assert collect(agent, 2)[0]["agent_rewards"] == [{"reward": 0.0}, {"reward": 1.0}]


@pytest.mark.parametrize(("kind", "name"), [("early", "KeyError"), ("loop", "RuntimeError")])
def test_an_error_that_no_policy_caused_is_raised_at_first_and_masked_later(
    kind: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    well, broken = {"kind": "named"}, {"kind": kind}
    rollout = EndpointRollout(fails)
    for _ in range(2):  # a rollout that has not ended well is still the first
        with pytest.raises(AgentMistake, match=name):
            collect(rollout, [well, broken])
    collect(rollout, [well])
    output, metrics, _ = collect(rollout.fork(), [well, broken])
    assert reasons(output) == [StopReason.ENVIRONMENT_DONE, StopReason.ENVIRONMENT_UNAVAILABLE]
    assert output["agent_rewards"][1] is None and metrics["endpoint/error_share"] == 0
    assert "1 of 2 agents" in caplog.text and name in caplog.text
    with pytest.raises(AgentMistake, match=name):
        collect(rollout, [broken, broken])


def test_errors_of_all_agents_are_raised() -> None:
    rollout = EndpointRollout(fails)
    with pytest.raises(AgentMistake, match="SystemExit"):
        collect(rollout, [{"kind": "exit"}] * 2)
    collect(rollout, [{"kind": "exit"}, {"kind": "none"}])
    assert reasons(collect(rollout, [{"kind": "exit"}] * 2)[0]) == [StopReason.AGENT_ERROR] * 2, "of the policy"
    with pytest.raises(AgentMistake, match=r"127\.0\.0\.1 to NO_PROXY.*ConnectError"):
        collect(rollout, [{"kind": "unreachable"}] * 2)
    output, *_ = collect(rollout, [{"kind": "unreachable"}, {"kind": "lost"}])
    assert reasons(output) == [StopReason.ENVIRONMENT_UNAVAILABLE] * 2, "one of them had an answer"


def test_full_contexts_and_trajectories_refuse_calls() -> None:
    refusals: list[str] = []

    async def agent(example: dict[str, Any], endpoint: Access) -> None:
        texts = ["x" * example["size"]]
        for _ in range(8):
            try:
                texts += [await ask(endpoint, *texts), "more"]
            except RuntimeError as error:
                refusals.append(str(error))
                if not example["shortens"]:
                    raise
                texts = ["more"]

    def ended(size: int = 1, shortens: bool = False, **options: Any) -> tuple[list[StopReason], int]:
        output, *_ = collect(agent, [{"prompt": "w", "size": size, "shortens": shortens}], **options)
        assert len(output["completion_ids"][0]) <= options.get("trajectory", 10**9)
        return reasons(output), len(output["trajectory"][0].turns)

    # The prompt has 97 tokens beside its x; each turn adds 7 of the policy, and the next message 24.
    assert ended(window=200) == ([StopReason.CONTEXT_LIMIT], 4)
    assert ended(size=200, window=200) == ([StopReason.CONTEXT_LIMIT], 0)
    assert ended(shortens=True, window=200) == ([StopReason.ENVIRONMENT_DONE], 7)
    begins = '"message": "This model\'s maximum context length is 200 tokens. However, your messages resulted in '
    assert all("400" in each and "context_length_exceeded" in each and begins in each for each in refusals)
    assert ended(trajectory=100, turn=50) == ([StopReason.TRAJECTORY_LIMIT], 4)
    assert ended(turn=3) == ([StopReason.TURN_LIMIT], 8)


def test_the_last_turn_decides_whether_a_limit_ended_the_trajectory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Even if the agent then hangs, which is said, because it returns no reward."""
    hanging: set[int] = set()
    end_time_limits(monkeypatch, lambda: len(hanging) == 2)

    async def agent(example: dict[str, Any], endpoint: Access) -> None:
        with suppress(RuntimeError):
            for limit in example["limits"]:
                await ask(endpoint, "hi", max_tokens=limit)
        if example["hangs"]:
            hanging.add(example["i"])
            await asyncio.sleep(600)

    kinds = [([3, 20], False), ([20, 3], False), ([20, 3], True), ([20, 20, 20], True)]
    rows = [{"i": i, "limits": limits, "hangs": hangs} for i, (limits, hangs) in enumerate(kinds)]
    output, *_ = collect(agent, rows, trajectory=14)
    assert reasons(output) == [
        StopReason.ENVIRONMENT_DONE,
        StopReason.TURN_LIMIT,
        StopReason.TURN_LIMIT,
        StopReason.TRAJECTORY_LIMIT,
    ]
    assert output["agent_rewards"] == [None] * 4 and "2 of 4 agents exceeded `time_limit_s`" in caplog.text


def test_errors_of_all_agents_without_room_for_a_call_are_the_policys() -> None:
    async def agent(example: Any, endpoint: Access) -> None:
        for _ in range(3):
            await ask(endpoint, "hi")

    output, metrics, _ = collect(agent, 2, trajectory=10)
    assert reasons(output) == [StopReason.TRAJECTORY_LIMIT] * 2
    assert output["agent_rewards"] == [{"reward": 0.0}] * 2 and metrics["endpoint/error_share"] == 1
    with pytest.raises(AgentMistake, match="SystemExit"):  # not of a turn that was cut
        collect(fails, [{"kind": "exit"}] * 2, turn=3)


def test_messages_are_completions_where_prompts_are() -> None:
    output, *_ = collect(marked, [{"prompt": [{"role": "user", "content": "hi"}], "i": 0}], echo)
    (messages,) = output["trajectory_messages"]
    said = {"role": "assistant", "content": "I heard mark0x."}
    heard = {"role": "user", "content": "again mark0x"}
    assert messages == [said, heard, said, heard, said]
    assert "trajectory_messages" not in collect(marked, 1, echo)[0]


def test_rollouts_at_the_same_time_share_an_endpoint() -> None:
    rollout = EndpointRollout(marked)
    forks = [rollout.fork() for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        outputs = [*threads.map(lambda fork: collect(fork, 4, echo)[0], forks)]
    assert all(output["agent_rewards"] == [{"reward": 1.0}] * 4 for output in outputs)
    assert [each.name for each in threading.enumerate()].count("sorl-endpoint") == 1


HANGING = """
import time
from tests.endpoint import collect

def agent(example, endpoint):
    if example["i"]:
        time.sleep(600)

collect(agent, 2, time_limit_s=0.1)
print("done")
"""


@pytest.mark.trains
def test_nothing_keeps_python_from_ending() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=300, check=True)
    assert ended.stdout == "done\n"
