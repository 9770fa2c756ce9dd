"""TRL's own tool loop (`tools=`, `environment_factory=`) under SOGRPOTrainer: its turns, and what tools may not do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from sorl_trl import SOGRPOConfig, SOGRPOTrainer
from sorl_trl.rollout import TagProtocol
from sorl_trl.search import RetryPolicy, SearchError, SearchUnavailable
from sorl_trl.trainers.agents.native_tools import answer_in_messages, search_tool
from sorl_trl.types import Passage
from tests.policies import build_policy
from tests.tools import ANSWER, CALL, QUESTION, Atlas, build, lookup, qwen_tokenizer, rollout, scripted
from tests.training import settings


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

    rows = Dataset.from_list([{"prompt": QUESTION}] * 8)
    config = SOGRPOConfig(**settings(tmp_path, max_completion_length=512, max_steps=1))
    policy = build_policy(vocab_size=len(chat_tokenizer))
    trainer = SOGRPOTrainer(
        policy, lambda **_: [0.0] * 16, config, rows, processing_class=chat_tokenizer, tools=[lookup],
        rollout_func=rollout,
    )  # fmt: skip
    trainer._generate_single_turn = scripted(chat_tokenizer)
    with pytest.raises(ValueError, match="turn_ids has shape"):
        trainer.train()


@pytest.mark.parametrize("native", [{"tools": [lookup]}, {"environment_factory": Atlas}], ids=["tools", "environment"])
def test_native_tools(tmp_path: Path, chat_tokenizer: Any, native: dict[str, Any]) -> None:
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Where is Oslo? {i}"}]} for i in range(8)])
    counts: list[int] = []

    def turn_reward(turn_ids: Any, **_: Any) -> list[list[float]]:
        counts.extend(max(row) + 1 for row in turn_ids)
        return [[0.5] * max(row) + [1.0] for row in turn_ids]

    policy = build_policy(vocab_size=len(chat_tokenizer))
    config = SOGRPOConfig(**settings(tmp_path, max_completion_length=512, max_steps=2))
    trainer = SOGRPOTrainer(policy, turn_reward, config, rows, processing_class=chat_tokenizer, **native)
    trainer._generate_single_turn = scripted(chat_tokenizer)
    batch = trainer._generate_and_score_completions([dict(row) for row in rows])
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
