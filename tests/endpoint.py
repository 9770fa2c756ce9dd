"""An agent's side and a policy's side for the endpoint: chat formats without a model, and an engine with a script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import trl.chat_template_utils as templates
from openai import OpenAI

from sorl_trl import EndpointRollout
from sorl_trl.endpoint import Access, agents
from sorl_trl.endpoint.contexts import Answer
from sorl_trl.endpoint.conversation import Call, Conversation
from sorl_trl.endpoint.messages import ChatFormat
from sorl_trl.endpoint.rollout import _endpoint
from sorl_trl.endpoint.run import CallLimits, Run
from sorl_trl.rollout import Engine, Generation, RolloutLimits, TurnEnd, TurnRequest
from sorl_trl.rollout.chat import RolloutSetup
from sorl_trl.rollout.policy_rollout import rollout_output
from sorl_trl.rollout.trajectories import closed
from sorl_trl.rollout.turns import ApiTurns
from sorl_trl.trainers.returned import read_output
from tests.tools import gemma_tokenizer, qwen_tokenizer

END = "<|im_end|>"
HI = [{"role": "user", "content": "hi"}]
SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {"name": "search", "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}},
}


HTTP = httpx2.AsyncClient(timeout=60)
"""Shared, because each client of the SDK would take a tenth of a second to begin."""


async def ask(endpoint: Access, *texts: str, retries: int = 0, **body: Any) -> str:
    """A call whose messages are of the user and of the policy in turn."""
    messages = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "x-stainless-retry-count": str(retries)}
    url = f"{endpoint.base_url}/chat/completions"
    response = await HTTP.post(url, json={"model": "m", "messages": messages, **body}, headers=headers)
    if response.status_code != 200:
        raise RuntimeError(f"{response.status_code} {response.text}")
    return str(response.json()["choices"][0]["message"]["content"])


def ask_sdk(endpoint: Access, text: str, **options: Any) -> Any:
    with OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, **options) as client:
        return client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])


def tokenizer_of(family: str) -> Any:
    """A byte-level tokenizer with a family's chat template. "merges" has tokens of several characters, too."""
    if family == "gemma":
        return gemma_tokenizer()
    if family == "merges":
        corpus = ['<tool_call>\n{"name": "search", "arguments": {"query": "Where is Tromsø?"}}\n</tool_call>\n\n'] * 3
        return qwen_tokenizer(corpus)
    tokenizer: Any = qwen_tokenizer()
    if family != "qwen2_5":
        tokenizer.chat_template = getattr(templates, f"{family.removesuffix('_training')}_chat_template")
        templates.add_response_schema(tokenizer)
    if family.endswith("_training"):  # which shows earlier thoughts in any case
        tokenizer.chat_template = templates.get_training_chat_template(tokenizer)
    return tokenizer


def setup_of(tokenizer: Any, turn: int = 512, trajectory: int = 10**9) -> RolloutSetup:
    end = "<end_of_turn>" if "<end_of_turn>" in tokenizer.get_vocab() else tokenizer.eos_token
    ends = [*dict.fromkeys([tokenizer.convert_tokens_to_ids(end), tokenizer.eos_token_id])]
    return RolloutSetup(tokenizer, None, {}, ends, RolloutLimits(10**9, turn, 10**9, trajectory))


@cache
def chat_of(family: str = "qwen2_5") -> ChatFormat:
    return ChatFormat.of(setup_of(tokenizer_of(family)))


def generation(chat: ChatFormat, text: str) -> Generation:
    ids = chat.encode(text)
    return Generation(tuple(ids), (-1.0,) * len(ids), True)


def say(conversation: Conversation, call: Call, text: str) -> Answer:
    """Have the policy answer a call of a conversation."""
    return conversation.finish(call, generation(conversation._chat, text))


Script = Callable[[int, list[int]], "str | Sequence[int] | None"]
"""What a row says after what it has read: a text, token ids, or None as long as it still samples."""


class ScriptedEngine(Engine):
    """Says what a script returns, up to a stop string or the end of a message."""

    def __init__(self, script: Script, tokenizer: Any, window: int | None = None) -> None:
        self.script, self.tokenizer, self.window = script, tokenizer, window
        self.end = TurnEnd(tokenizer, (), setup_of(tokenizer).eos_token_ids)
        self.asked: list[tuple[int, list[int]]] = []
        self.schemas: list[Mapping[str, Any] | None] = []
        self.released: list[int] = []
        self.polled: list[tuple[int, ...]] = []
        """The rows of each poll."""
        self.submitted: dict[int, tuple[list[int], int, Sequence[str]]] = {}

    def open(self, rows: int) -> None:
        self.submitted = {}

    def submit(self, request: TurnRequest) -> None:
        assert request.row not in self.submitted, "a row has one turn at a time"
        self.submitted[request.row] = ([*request.token_ids], request.limit, request.stops)
        self.asked.append((request.row, [*request.token_ids]))
        self.schemas.append(request.schema)

    def poll(self) -> list[tuple[int, Generation]]:
        self.polled.append(tuple(sorted(self.submitted)))
        ended = []
        for row, (ids, limit, stops) in sorted(self.submitted.items()):
            turn = self.script(row, ids)
            if turn is not None:
                written = self.tokenizer.encode(turn, add_special_tokens=False) if isinstance(turn, str) else [*turn]
                ended.append((row, self._cut(written, limit, stops)))
        for row, _ in ended:
            del self.submitted[row]
        return ended

    def _cut(self, ids: list[int], limit: int, stops: Sequence[str]) -> Generation:
        sizes = range(1, min(len(ids), limit) + 1)
        size = next((size for size in sizes if self.end.reached([ids[:size]], [stops])[0]), None)
        cut = tuple(ids[: size or limit])
        return Generation(cut, (-1.0,) * len(cut), size is not None)

    def release(self, row: int) -> None:
        self.released.append(row)
        self.submitted.pop(row, None)

    @property
    def idle(self) -> bool:
        return not self.submitted


def collect(
    agent: Any, examples: int | Sequence[Mapping[str, Any]] = 1, script: Any = "Hello.", **options: Any
) -> tuple[dict[str, Any], dict[str, float], ScriptedEngine]:
    """One rollout of an agent, or with an `EndpointRollout`: its output, its metrics, and the engine."""
    rows = [{"prompt": f"w{i}", "i": i} for i in range(examples)] if isinstance(examples, int) else examples
    tokenizer = options.pop("tokenizer", None) or qwen_tokenizer()
    limits = {name: options.pop(name) for name in ("turn", "trajectory") if name in options}
    engine = options.pop("engine", None)
    if engine is None:
        saying = (lambda row, ids: script + END) if isinstance(script, str) else script
        engine = ScriptedEngine(saying, tokenizer, options.pop("window", None))
    rollout = agent if isinstance(agent, EndpointRollout) else EndpointRollout(agent, **options)
    prompts = [row.get("prompt", "w") for row in rows]
    trajectories, metrics = rollout.collect(setup_of(tokenizer, **limits), prompts, rows, engine)
    return rollout_output(closed(trajectories, tokenizer.eos_token_id, engine.window)), metrics, engine


@contextmanager
def without_a_rollout() -> Iterator[Access]:
    """The endpoint, for requests that would end a rollout."""
    turns = ApiTurns(ScriptedEngine(lambda *_: "", qwen_tokenizer()), 1, 0)
    run = Run(0, Conversation(chat_of()), turns, CallLimits(512, None, None))
    endpoint = _endpoint("127.0.0.1")
    endpoint.admit([run])
    yield Access(endpoint.base_url, run.key)
    endpoint.dismiss([run])


def end_time_limits(monkeypatch: pytest.MonkeyPatch, is_due: Callable[[], bool]) -> None:
    """Have `is_due` say when the time of all agents is up, in place of the clock."""

    async def wait(tasks: set[asyncio.Task[Any]], timeout: float) -> None:
        while not is_due() and not all(task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=0.02)

    monkeypatch.setattr(agents, "asyncio", SimpleNamespace(**{**vars(asyncio), "wait": wait}))


@dataclass(frozen=True)
class Ran:
    """An agent's run."""

    output: Mapping[str, Any]
    metrics: Mapping[str, float]
    engine: ScriptedEngine

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many calls extended a context, were spliced to one, and began a new one."""
        extended, spliced, new = (
            int(self.metrics[f"endpoint/{kind}"]) for kind in ("extended", "spliced", "new_context")
        )
        return extended, spliced, new

    @property
    def read(self) -> list[str]:
        """What the policy has read before each turn."""
        return [self.engine.tokenizer.decode(context) for _, context in self.engine.asked]

    @property
    def rewards(self) -> Any:
        return self.output["agent_rewards"][0]

    @property
    def trajectory(self) -> Any:
        return self.output["trajectory"][0]


def run_agent(
    agent: Any,
    example: Mapping[str, Any],
    tokenizer: Any,
    say: Callable[[str, int], str | Sequence[int]],
    constrains: bool = False,
    **limits: int,
) -> Ran:
    """Run an agent once; `say` gets what the policy has read, and after how many turns.

    What training reads before each turn must be what the policy has read.
    """
    end = tokenizer.eos_token_id

    def script(row: int, context: list[int]) -> list[int]:
        read = tokenizer.decode(context)
        turn = say(read, len(engine.asked) - 1)
        if isinstance(turn, str):  # the endpoint may have begun the call
            turn = turn[max(size for size in range(len(turn) + 1) if read.endswith(turn[:size])) :]
        return [*(tokenizer.encode(turn, add_special_tokens=False) if isinstance(turn, str) else turn), end]

    engine = ScriptedEngine(script, tokenizer)
    engine.constrains = constrains
    output, metrics, _ = collect(agent, [example], engine=engine, tokenizer=tokenizer, **limits)
    (found,) = read_output(output, 1)
    assert [found.read_before(start) for start, _ in found.spans] == [context for _, context in engine.asked]
    return Ran(output, metrics, engine)
