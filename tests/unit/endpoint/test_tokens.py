"""Whatever a policy writes and a client makes of it: the policy reads what it is trained on, and each token once."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_trl.endpoint import completions
from sorl_trl.endpoint.conversation import FIRST, SPLICED, Call, Conversation
from sorl_trl.endpoint.messages import ChatFormat
from sorl_trl.rollout import Generation
from sorl_trl.rollout.routing import laid_out_routes
from sorl_trl.types import StopReason, Trajectory
from tests.endpoint import SEARCH, chat_of
from tests.tools import HOSTILE

WORDS = ["Oslo", "Tromsø", " ", "\n", "🙂", "e\u0301", "\u202e", "�", "<|im_end", "{", "</think>", '"', "\\", "\x00"]
VALUES: list[Any] = ["Oslo", "Tromsø 🙂", '"\\\n', "\ud800", 1, 1.0, -2.5e30, None, True, [], [[1]], {"b": 1, "a": {}}]
CODE = "</code>"


class Policy:
    """Writes what policies write, in tokens that no encoder may have chosen."""

    def __init__(self, chat: ChatFormat, rng: random.Random) -> None:
        self.chat, self.rng = chat, rng

    def generation(self, stops: tuple[str, ...]) -> Generation:
        rng = self.rng
        end = rng.choice(self.chat.ends)
        text = rng.choice(["", "", f"<think>\n{self.words()}\n</think>\n\n", "<think>\n\n</think>\n\n", "<think>"])
        text += rng.choice([self.words(), ""])
        text += "".join(rng.choice(["", "\n"]) + self.call() for _ in range(rng.choice([0, 0, 1, 1, 2, 3])))
        text += rng.choice(["", "", "", "\n", " " + self.words()])
        if stops and rng.random() < 0.7:
            ids, end = self.tokens(text + rng.choice(stops)), rng.choice(["", "\n"])
            ids += self.tokens(end)
        elif rng.random() < 0.2:  # a limit cuts it
            ids = self.tokens(text)
            ids = ids[: rng.randint(1, max(1, len(ids)))] or self.tokens(end)
        else:
            ids = self.tokens(text) + self.chat.encode(end)
        return Generation(tuple(ids), (-1.0,) * len(ids), True)

    def words(self) -> str:
        return "".join(self.rng.choices(WORDS, k=self.rng.randint(1, 4)))

    def call(self) -> str:
        rng = self.rng
        arguments = {name: rng.choice(VALUES) for name in rng.sample(["query", "z", "ø"], rng.randint(0, 3))}
        style: dict[str, Any] = rng.choice([{}, {"separators": (",", ":")}, {"indent": 1}, {"ensure_ascii": False}])
        call = {"name": "search", "arguments": rng.choice([arguments, arguments, json.dumps(arguments), "5", [1]])}
        written = rng.choice([json.dumps(call, **style), json.dumps(call, **style), json.dumps(call)[:-1], '"text"'])
        return f"<tool_call>\n{written}\n</tool_call>"

    def tokens(self, text: str) -> list[int]:
        """Some tokens of a text in other pieces, and some bytes that are no text."""
        rng, ids = self.rng, list[int]()
        for token in self.chat.encode(text.encode(errors="replace").decode()):
            piece = self.chat.tokenizer.decode([token])
            is_split = rng.random() < 0.3 and len(piece) > 1 and token not in self.chat.tokenizer.all_special_ids
            ids += [each for c in piece for each in self.chat.encode(c)] if is_split else [token]
        if rng.random() < 0.1:
            ids.insert(rng.randint(0, len(ids)), rng.randint(0, 255))
        return ids


class Agent:
    """A client of one trajectory that does with messages what clients do, with several calls under way at once."""

    def __init__(self, chat: ChatFormat, rng: random.Random) -> None:
        self.chat, self.rng, self.policy = chat, rng, Policy(chat, rng)
        self.conversation = Conversation(chat, row=3, stride=7)
        self.histories: list[list[dict[str, Any]]] = []
        self.under_way: list[tuple[Call, dict[str, Any], list[int]]] = []
        self.answered: dict[Call, tuple[list[int], tuple[int, ...]]] = {}

    def act(self) -> None:
        if self.under_way and self.rng.random() < 0.6:
            call, body, read = self.under_way.pop(self.rng.randrange(len(self.under_way)))
            if self.rng.random() < 0.1:
                self.conversation.cancel(call)
            else:
                self._receive(call, body, read)
            return
        body = self._body()
        call = self.conversation.begin(completions.read(json.loads(json.dumps(body))))
        read = [*call.context.token_ids]
        shown = self.chat.render(call.messages, call.request.tools)
        assert read, "an engine needs a token"
        assert call.kind == SPLICED or call.context.text == shown
        if call.kind == FIRST or not call.context.answers:
            assert read == self.chat.encode(shown)
        self.under_way.append((call, body, read))

    def _receive(self, call: Call, body: dict[str, Any], read: list[int]) -> None:
        generation = self.policy.generation(call.request.stops)
        routes = np.array([*read, *generation.token_ids][:-1], dtype=np.int16).reshape(-1, 1, 1)
        generation = replace(generation, routes=routes)  # as if one router sent each token to the expert of its number
        answer = self.conversation.finish(call, generation)
        self.answered[call] = read, generation.token_ids
        said = completions.whole(body, answer)["choices"][0]["message"]
        json.dumps(said, ensure_ascii=False).encode()  # as clients send it
        self.histories.append([*body["messages"], self._sent_back(said, body)])
        if self.rng.random() < 0.03:
            self.conversation.cancel(call)

    def _body(self) -> dict[str, Any]:
        rng = self.rng
        question = {"role": "user", "content": rng.choice(["hi", "Where is Oslo?", HOSTILE])}
        messages = [question]
        if self.histories and rng.random() < 0.9:
            history = self.histories[-1] if rng.random() < 0.8 else rng.choice(self.histories)
            calls = history[-1].get("tool_calls") or ()
            results = [self._result(call) for call in calls]
            messages = [*history, *(results or [question])]
            if rng.random() < 0.05:
                messages = messages[: rng.randint(1, len(messages))]
        tools = {"tools": [SEARCH]} if rng.random() < 0.97 else {}
        stop = {"stop": [CODE, "Observation:"]} if rng.random() < 0.2 else {}
        return {
            "model": "m",
            "messages": messages,
            **tools,
            **stop,
            "tool_choice": rng.choice(["auto"] * 9 + ["none"]),
        }

    def _result(self, call: dict[str, Any]) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": call["id"], "content": self.rng.choice(["found", "", HOSTILE])}

    def _sent_back(self, said: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        kind = self.rng.choice(["as is"] * 12 + ["strip", "json", "thoughts", "content", "text", "append"])
        sent = {**said}
        calls = sent.get("tool_calls") or ()
        if kind in ("thoughts", "json"):
            sent.pop("reasoning_content", None)
        if kind == "strip":
            sent["content"] = (sent["content"] or "").strip()
        elif kind == "json":
            sent["tool_calls"] = [
                {**each, "function": {**each["function"], "arguments": _spaced(each["function"]["arguments"])}}
                for each in calls
            ]
        elif kind == "content" and calls:
            sent["content"] = None
        elif kind == "text":
            sent = {"role": "assistant", "content": json.dumps(sent)}
        elif kind == "append" and "stop" in body and not calls:
            sent["content"] = (sent["content"] or "") + CODE
        return sent


def _spaced(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), indent=2)
    except ValueError:
        return arguments


@pytest.mark.parametrize("family", ["merges", "qwen3", "qwen3_training", "gemma"])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=40)
def test_each_turn_is_trained_on_once_after_what_the_policy_read(family: str, seed: int) -> None:
    chat = chat_of(family)
    agent = Agent(chat, random.Random(seed))
    for _ in range(20):
        agent.act()
    for call, *_ in agent.under_way:
        agent.conversation.cancel(call)
    turns = [agent.answered[call] for call in agent.conversation.calls]
    trajectory = agent.conversation.trajectory(StopReason.ENVIRONMENT_DONE)
    assert [trajectory.read_before(start) for start, _ in trajectory.spans] == [read for read, _ in turns]
    said = [tuple(trajectory.completion_ids[start:end]) for start, end in trajectory.spans]
    assert said == [sampled for _, sampled in turns]
    assert sum(trajectory.env_mask) == sum(len(sampled) for _, sampled in turns)
    assert agent.conversation.completion_length == len(trajectory.shown())
    check_routes(trajectory, laid_out_routes(trajectory, (1, 1)).ravel())


def check_routes(trajectory: Trajectory, routes: Any) -> None:
    """Those of each context are known but for its last token."""
    segments = trajectory.segments
    ids = [*trajectory.prompt_ids, *(token for each in segments for token in each.token_ids)]
    contexts = [0] * len(trajectory.prompt_ids) + [each.context for each in segments for _ in each.token_ids]
    for context in {turn.context for turn in trajectory.turns}:
        own = [place for place, each in enumerate(contexts) if each == context]
        assert routes[own].tolist() == [*(ids[place] for place in own[:-1]), -1]
