"""TRL's own tool loop (`tools=`, `environment_factory=`) under SOGRPOTrainer: its turns, and what tools may not do."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from sorl_trl import chatml_tools
from sorl_trl.agents.native_tools import answer_in_messages, search_tool
from sorl_trl.rollout import TagProtocol
from sorl_trl.search import RetryPolicy, SearchError, SearchUnavailable
from sorl_trl.types import Passage
from tests.policies import build_policy
from tests.tools import ANSWER, CALL, QUESTION, SIMPLE, Atlas, build, lookup, qwen_tokenizer, rollout


@pytest.fixture
def chat_tokenizer() -> PreTrainedTokenizerFast:
    return qwen_tokenizer()


def test_tools_must_not_go_on_after_recorded_turns(tmp_path: Path, chat_tokenizer: Any) -> None:
    """TRL would run its tool loop over a rollout's completions: the turns recorded before it no longer fit."""

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        call = chat_tokenizer.encode(CALL, add_special_tokens=False)
        rows = [call for _ in prompts]
        turns = [[0] * len(call) for _ in prompts]
        return {"prompt_ids": [[1] for _ in prompts], "completion_ids": rows, "logprobs": None, "turn_ids": turns}

    trainer = build(tmp_path, chat_tokenizer, lambda **_: [0.0] * 16, tools=[lookup], rollout_func=rollout)
    with pytest.raises(ValueError, match="turn_ids has shape"):
        trainer.train()


@pytest.mark.parametrize("native", [{"tools": [lookup]}, {"environment_factory": Atlas}], ids=["tools", "environment"])
def test_native_tools(tmp_path: Path, chat_tokenizer: Any, native: dict[str, Any]) -> None:
    counts: list[int] = []

    def turn_reward(turn_ids: Any, **_: Any) -> list[list[float]]:
        counts.extend(max(row) + 1 for row in turn_ids)
        return [[0.5] * max(row) + [1.0] for row in turn_ids]

    trainer = build(tmp_path, chat_tokenizer, turn_reward, {"max_steps": 2}, **native)
    batch, _ = rollout(trainer)
    assert counts == [2, 1] * 4
    for row in range(8):
        texts = [
            chat_tokenizer.decode(batch["completion_ids"][row][batch["turn_ids"][row] == k])
            for k in range(counts[row])
        ]
        assert texts == ([CALL, ANSWER] if counts[row] == 2 else [ANSWER])
    assert batch["advantages"].shape == batch["completion_ids"].shape
    trainer.train()
    assert 1 < trainer.state.log_history[0]["turns/per_trajectory"] < 2
    assert trainer.state.log_history[0]["tools/call_frequency"] == 0.5
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


PLAIN = (QUESTION, [{"role": "system", "content": "Be kind."}, *QUESTION, {"role": "assistant", "content": "Here."}])


@pytest.fixture
def simple_tokenizer(chat_tokenizer: Any) -> Any:
    chat_tokenizer.chat_template = SIMPLE
    return chat_tokenizer


@pytest.mark.parametrize("native", [{"tools": [lookup]}, {"environment_factory": Atlas}], ids=["tools", "environment"])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_template_that_shows_no_tools(
    tmp_path: Path, simple_tokenizer: Any, native: dict[str, Any], by_name: bool
) -> None:
    simple_tokenizer.save_pretrained(tmp_path / "policy")
    build_policy(vocab_size=len(simple_tokenizer)).save_pretrained(tmp_path / "policy")
    given = {"policy": str(tmp_path / "policy")} if by_name else {}
    with pytest.raises(
        ValueError, match=r"shows no tool calls: `processing_class=chatml_tools\(tokenizer\)`"
    ) as error:
        build(tmp_path, None if by_name else simple_tokenizer, lambda **_: [], **native, **given)
    assert "\n" not in str(error.value)


def test_a_template_of_ours_shows_them(tmp_path: Path, simple_tokenizer: Any) -> None:
    before = [simple_tokenizer.apply_chat_template(said, tokenize=False) for said in PLAIN]
    tokenizer = chatml_tools(simple_tokenizer)
    assert [tokenizer.apply_chat_template(said, tokenize=False) for said in PLAIN] == before
    seen: list[Any] = []

    def reward(completions: Any, **_: Any) -> list[float]:
        seen[:] = completions
        return [float(len(each)) for each in completions]

    trainer = build(tmp_path, tokenizer, reward, tools=[lookup])
    batch, logged = rollout(trainer)
    assert [len(each) for each in seen] == [3, 1] * 4
    assert seen[0][1]["content"] == "Oslo is in Norway"
    assert seen[0][0]["tool_calls"][0]["function"] == {"name": "lookup", "arguments": {"city": "Oslo"}}
    assert logged["tools/call_frequency"] == 0.5
    said = tokenizer.decode(batch["completion_ids"][0][batch["completion_mask"][0].bool()])
    reply = (
        "\n<|im_start|>user\n<tool_response>\nOslo is in Norway\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert said == CALL + reply + ANSWER
    tools = tokenizer.decode(batch["prompt_ids"][0]).partition("# Tools")[2].partition("<|im_end|>")[0]
    assert '"name": "lookup"' in tools
    trainer.train()
    trainer.save_model(str(tmp_path / "policy"))
    saved = AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert (saved.chat_template, saved.response_template) == (tokenizer.chat_template, tokenizer.response_template)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"eos_token": "<|endoftext|>"}, r"`tokenizer.eos_token` is '<\|endoftext\|>', but must be '<\|im_end\|>'"),
        ({"chat_template": None}, "no chat template, but must have a template of ChatML"),
    ],
)
def test_a_template_of_ours_is_for_chatml(simple_tokenizer: Any, change: dict[str, Any], why: str) -> None:
    for name, value in change.items():
        setattr(simple_tokenizer, name, value)
    with pytest.raises(ValueError, match=why):
        chatml_tools(simple_tokenizer)


def test_a_template_that_shows_tools_is_left_as_it_is(chat_tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="shows tools: it must be left as it is"):
        chatml_tools(chat_tokenizer)


class Engine:
    """Finds one passage, refuses an empty query, and is down for "Oslo"."""

    def search_batch(self, queries: Any, k: int) -> list[list[Passage]]:
        if queries == [""]:
            raise SearchError("empty")
        if queries == ["Oslo"]:
            raise SearchUnavailable("down")
        return [[Passage("1", "Bern", f"in Switzerland, k={k}")] if query == "Bern" else [] for query in queries]


def test_a_search_tool_says_what_was_found() -> None:
    search = search_tool(Engine(), k=2)
    assert search("Bern") == "Doc 1(Title: Bern) in Switzerland, k=2"
    assert search("Rome") == TagProtocol().no_results
    assert search("") == TagProtocol().search_failed
    schema = get_json_schema(search)["function"]
    assert (schema["name"], schema["parameters"]["required"]) == ("search", ["query"])
    with pytest.raises(ValueError, match="`k` is 0, but must be a whole number, at least 1"):
        search_tool(Engine(), k=0)


@pytest.mark.parametrize("thread_safe", [False, True])
def test_several_threads_ask_an_engine_only_where_it_is_made_for_them(thread_safe: bool) -> None:
    class Counted(Engine):
        asking = most = 0

        def search_batch(self, queries: list[str], k: int) -> list[list[Passage]]:
            self.asking += 1
            self.most = max(self.most, self.asking)
            both.wait(60.0) if thread_safe else time.sleep(0.01)
            self.asking -= 1
            return super().search_batch(queries, k)

    engine, both = Counted(), threading.Barrier(2)
    engine.thread_safe = thread_safe  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as threads:
        assert len(set(threads.map(search_tool(engine), ["Bern", "Bern"]))) == 1
    assert engine.most == 1 + thread_safe


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_a_trajectory_whose_engine_is_down_is_masked(tmp_path: Path, chat_tokenizer: Any, as_coroutine: bool) -> None:
    search = search_tool(Engine(), retry=RetryPolicy(attempts=1))

    def ask(city: str) -> str:
        return search(city)

    async def ask_later(city: str) -> str:
        return search(city)

    tool: Any = ask_later if as_coroutine else ask
    tool.__name__, tool.__doc__ = "lookup", lookup.__doc__
    seen: list[Any] = []

    def reward(completions: Any, **_: Any) -> list[float]:
        seen[:] = completions
        return [1.0] * len(completions)

    trainer = build(tmp_path, chat_tokenizer, reward, tools=[tool])
    batch, logged = rollout(trainer)
    has_turn = (batch["turn_ids"] >= 0).any(-1).tolist()
    assert has_turn == [False, True] * 4
    assert not batch["tool_mask"][::2].any()
    assert not batch["advantages"][::2].any()
    assert logged["trajectories_without_turn"] == 0.5
    told = [each["content"] for messages in seen for each in messages if each["role"] == "tool"]
    assert told == ["the search engine is unavailable"] * 4
    trainer.train()
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_answers_are_those_of_the_assistant() -> None:
    said = {"role": "assistant", "content": "<answer> Rome <answer>Oslo</answer> or <answer>Lima</answer>"}
    later = {"role": "assistant", "content": "No: <answer>Bern</answer>"}
    called = {"role": "assistant", "content": None, "tool_calls": []}
    told = {"role": "tool", "name": "lookup", "content": "<answer>Lyon</answer>"}
    shown = {"role": "tool", "name": "lookup", "content": [{"type": "image", "image": None}]}
    assert answer_in_messages([called, told, said, told, shown, later]) == "Oslo"
    assert answer_in_messages([called, told]) is None
    assert answer_in_messages([{"role": "assistant", "content": "<answer>"}, told]) is None
    assert answer_in_messages([{"role": "assistant", "content": "Lyon</answer> <answer> </answer>"}]) is None
    with pytest.raises(TypeError, match="must be a list of messages"):
        answer_in_messages("<answer>Lyon</answer>")  # type: ignore[arg-type]
