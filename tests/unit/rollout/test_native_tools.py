"""A search engine as a tool, answers in messages, and tokenizers that get a template with tools."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils import get_json_schema

from sorl_trl import answer_in_messages, chatml_tools, search_tool
from sorl_trl.rollout import RetryPolicy, TagProtocol, Unavailable
from sorl_trl.rollout.native_tools import ToolSanitizer
from sorl_trl.search import SearchError, SearchUnavailable
from sorl_trl.types import Passage
from tests.tools import QUESTION, SIMPLE, lookup, qwen_tokenizer


class Engine:
    """Finds one passage, refuses an empty query, and is down for "Oslo"."""

    def search_batch(self, queries: Any, k: int) -> list[list[Passage]]:
        if queries == [""]:
            raise SearchError("empty")
        if queries == ["Oslo"]:
            raise SearchUnavailable("down")
        return [[Passage("1", "Bern", f"in Switzerland, k={k}")] if query == "Bern" else [] for query in queries]


def test_a_search_tool_returns_what_was_found() -> None:
    search = search_tool(Engine(), k=2, retry=RetryPolicy(attempts=1))
    assert search("Bern") == "Doc 1(Title: Bern) in Switzerland, k=2"
    assert search("Rome") == TagProtocol().no_results
    assert search("") == TagProtocol().search_failed
    assert isinstance(search("Oslo"), Unavailable)
    schema = get_json_schema(search)["function"]
    assert (schema["name"], schema["parameters"]["required"]) == ("search", ["query"])
    with pytest.raises(ValueError, match="`k` is 0"):
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


def test_images_stay_and_halves_that_a_template_joins_are_told_apart() -> None:
    policy = SimpleNamespace(_tokenizer=qwen_tokenizer(), _is_vlm=True, max_completion_length=100)
    image = {"type": "image", "image": object()}
    blocks = [image, {"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|> [1]"}]
    told = {"role": "tool", "name": "look", "content": blocks}
    shown: list[Any] = []

    def write(messages: list[dict[str, Any]]) -> list[int]:
        shown.extend(messages)
        return []

    ToolSanitizer(policy).suffix_ids([told], write)
    assert shown[0]["content"] == [*blocks[:2], {"type": "text", "text": "end|) (1)"}]
    assert told["content"] is blocks, "as reward functions read it"


def test_answers_are_those_of_the_assistant() -> None:
    answer = {"role": "assistant", "content": "<answer> Rome <answer>Oslo</answer> or <answer>Lima</answer>"}
    later = {"role": "assistant", "content": "No: <answer>Bern</answer>"}
    call = {"role": "assistant", "content": None, "tool_calls": []}
    result = {"role": "tool", "name": "lookup", "content": "<answer>Lyon</answer>"}
    image = {"role": "tool", "name": "lookup", "content": [{"type": "image", "image": None}]}
    assert answer_in_messages([call, result, answer, result, image, later]) == "Oslo"
    assert answer_in_messages([call, result]) is None
    assert answer_in_messages([{"role": "assistant", "content": "<answer>"}, result]) is None
    assert answer_in_messages([{"role": "assistant", "content": "Lyon</answer> <answer> </answer>"}]) is None
    with pytest.raises(TypeError, match="list of messages"):
        answer_in_messages("<answer>Lyon</answer>")  # type: ignore[arg-type]


def test_a_template_of_ours_shows_tools(tmp_path: Path) -> None:
    simple: Any = qwen_tokenizer()
    simple.chat_template = SIMPLE
    longer = [{"role": "system", "content": "Be kind."}, *QUESTION, {"role": "assistant", "content": "Here."}]
    before = [simple.apply_chat_template(messages, tokenize=False) for messages in (QUESTION, longer)]
    tokenizer: Any = chatml_tools(simple)
    assert [tokenizer.apply_chat_template(messages, tokenize=False) for messages in (QUESTION, longer)] == before
    prompt = tokenizer.apply_chat_template(QUESTION, tools=[lookup], tokenize=False)
    assert '"name": "lookup"' in prompt.partition("# Tools")[2].partition("<|im_end|>")[0]
    tokenizer.save_pretrained(tmp_path)
    saved = type(tokenizer).from_pretrained(tmp_path)
    assert (saved.chat_template, saved.response_template) == (tokenizer.chat_template, tokenizer.response_template)


def test_a_template_of_ours_is_for_chatml_without_tools() -> None:
    tokenizer: Any = qwen_tokenizer()
    with pytest.raises(ValueError, match="shows tools"):
        chatml_tools(tokenizer)
    tokenizer.chat_template, tokenizer.eos_token = SIMPLE, "<|endoftext|>"
    with pytest.raises(ValueError, match=r"`tokenizer.eos_token`"):
        chatml_tools(tokenizer)
