"""The ways to run one scripted rollout that `benchmarks.rollout` compares, each measured in a process of its own."""

from __future__ import annotations

import json
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from http.client import HTTPConnection
from importlib.resources import files
from typing import Any

import torch
from datasets import Dataset
from transformers import GenerationConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList
from trl import GRPOConfig, GRPOTrainer

from benchmarks.common import QUIET
from benchmarks.rollout.script import (
    PROTOCOL,
    REPLY,
    Cell,
    Interval,
    Script,
    ScriptedSearch,
    build_model,
    query,
    row_and_turn,
    tool_call,
)
from sorl_trl.endpoint import Access, EndpointRollout
from sorl_trl.rollout import (
    Collector,
    Engine,
    EngineOptions,
    Generation,
    HFGenerator,
    LockStepEngine,
    SlotEngine,
    TurnEnd,
    TurnRequest,
)
from sorl_trl.rollout.chat import RolloutSetup
from sorl_trl.types import Trajectory

TEMPLATE = "{% for m in messages %}{{ m['content'] + ('' if m['role'] == 'assistant' else reply) }}{% endfor %}"
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


class Scripted(Engine):
    """Comes before an engine, ends its turns where a script does, and records when it generated."""

    def follow(self, script: Script) -> None:
        self._script = script
        self._turn = [0] * len(script.turns)
        self.intervals: list[Interval] = []

    def submit(self, request: TurnRequest) -> None:
        limit = min(request.limit, self._script.turns[request.row][self._turn[request.row]])
        super().submit(replace(request, limit=limit))

    def poll(self) -> list[tuple[int, Generation]]:
        began = time.perf_counter()
        ended = super().poll()
        self.intervals.append((began, time.perf_counter()))
        return [(row, self._closed(row, generation)) for row, generation in ended]

    def _closed(self, row: int, generation: Generation) -> Generation:
        last = self._script.last_token(row, self._turn[row])
        self._turn[row] += 1
        return Generation((*generation.token_ids[:-1], last), generation.logprobs, stopped=True)


class ScriptedLockStep(Scripted, LockStepEngine):
    """All rows generate, then all search: `model.generate` for each turn."""


class ScriptedSlots(Scripted, SlotEngine):
    """No row waits for another."""


Rollout = Callable[[], tuple[int, list[Interval]]]
"""Does the rollout: the tokens of contexts that it has prefilled, and when it generated."""


def collect(
    script: Script, search: ScriptedSearch, build: Callable[[Any, Script, GenerationConfig], Scripted]
) -> Rollout:
    """By our collector, with the engine that a function builds of model, script and sampling."""
    model, cell = build_model(script.cell, script.tokenizer), script.cell
    config = GenerationConfig(**SAMPLED)  # type: ignore[no-untyped-call]
    engine = build(model, script, config)
    engine.follow(script)
    collector = Collector(script.tokenizer, search, PROTOCOL, script.limits, rejoin_after=cell.rejoin_after)

    def roll_out() -> tuple[int, list[Interval]]:
        with torch.no_grad():
            trajectories = collector.collect(script.prompts, engine)
        check_script(script, trajectories)
        return engine.prefilled_tokens, engine.intervals

    return roll_out


def lockstep(model: Any, script: Script, config: GenerationConfig) -> Scripted:
    return ScriptedLockStep(HFGenerator(model, TurnEnd(script.tokenizer, (), [script.tokenizer.eos_token_id]), config))


def slots_event(model: Any, script: Script, config: GenerationConfig) -> Scripted:
    return ScriptedSlots(model, TurnEnd(script.tokenizer, (), [script.tokenizer.eos_token_id]), config)


def endpoint(script: Script, search: ScriptedSearch) -> Rollout:
    """By an agent that makes API calls, over `http.client`, to the same engine."""
    script.tokenizer.chat_template = f"{{% set reply = {REPLY!r} %}}{TEMPLATE}"
    options, config = EngineOptions("slots", script.cell.rejoin_after), GenerationConfig(**SAMPLED)  # type: ignore[no-untyped-call]
    rollout = EndpointRollout(partial(scripted_agent, script, search), engine=options)
    engine = slots_event(build_model(script.cell, script.tokenizer), script, config)
    engine.follow(script)
    setup = RolloutSetup(script.tokenizer, None, {}, [script.tokenizer.eos_token_id], script.limits)
    examples = [{"row": row} for row in range(script.cell.rows)]

    def roll_out() -> tuple[int, list[Interval]]:
        with torch.no_grad():
            trajectories, metrics = rollout.collect(setup, [""] * len(examples), examples, engine)
        check_script(script, trajectories)
        if metrics["endpoint/new_context"]:
            raise RuntimeError(f"{metrics['endpoint/new_context']} contexts of each trajectory began anew")
        return engine.prefilled_tokens, engine.intervals

    return roll_out


def scripted_agent(script: Script, search: ScriptedSearch, example: dict[str, int], access: Access) -> float:
    row, decode = example["row"], script.tokenizer.decode
    host = access.base_url.removeprefix("http://").removesuffix("/v1")
    connection, headers = HTTPConnection(host), {"Authorization": f"Bearer {access.api_key}"}
    messages = [{"role": "user", "content": decode(script.prompts[row][:-1])}]
    for turn in range(len(script.turns[row])):
        body = json.dumps({"model": "policy", "messages": messages})
        connection.request("POST", "/v1/chat/completions", body, headers)
        message = json.load(connection.getresponse())["choices"][0]["message"]
        if turn < len(script.observations[row]):
            search.wait_for([query(row, turn)])
            found = decode(script.observations[row][turn][:-1])
            messages += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": found}]
    return 0.0


def check_script(script: Script, trajectories: Sequence[Trajectory]) -> None:
    """Raise RuntimeError unless the trajectories are those of the script."""
    for row, trajectory in enumerate(trajectories):
        turns = [len(turn.token_ids) for turn in trajectory.turns]
        read = [list(observation.token_ids) for observation in trajectory.observations]
        if turns != script.turns[row] or read != script.observations[row]:
            raise RuntimeError(f"row {row} has turns of {turns} tokens instead of {script.turns[row]}")


class ScriptedLlama(LlamaForCausalLM):
    """A Llama whose `generate` ends the turn of each row where the script does, with a call of the tool."""

    script: Script
    prefilled_tokens = 0

    def follow(self, script: Script) -> None:
        self.script = script
        self.calls = 0
        self.intervals: list[Interval] = []

    def generate(self, input_ids: Any, attention_mask: Any, generation_config: Any) -> Any:
        began = time.perf_counter()
        turn, context = self.calls, input_ids.shape[1]
        self.calls += 1
        # TRL generates for the rows that have called a tool, in their order.
        rows = [row for row, turns in enumerate(self.script.turns) if len(turns) > turn]
        limits = [self.script.turns[row][turn] for row in rows]
        output: Any = super().generate(  # type: ignore[misc]
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=generation_config,
            stopping_criteria=StoppingCriteriaList([_Limits(limits, context)]),
        )
        for place, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            output[place, context + limit - 2 : context + limit] = torch.tensor(self._ending(row, turn))
        self.prefilled_tokens += int(attention_mask.sum())
        self.intervals.append((began, time.perf_counter()))
        return output

    def _ending(self, row: int, turn: int) -> list[int]:
        is_last = turn == len(self.script.turns[row]) - 1
        word = "w0" if is_last else tool_call(query(row, turn))
        return list(self.script.tokenizer.convert_tokens_to_ids([word, self.script.tokenizer.eos_token]))


class _Limits(StoppingCriteria):
    def __init__(self, limits: list[int], context: int) -> None:
        self._limits = torch.tensor(limits)
        self._context = context

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return input_ids.shape[1] - self._context >= self._limits


def trl_loop(script: Script, searches: ScriptedSearch) -> Rollout:
    """TRL's way: all rows generate from their whole context, then their tools are called one after the other."""
    model = build_model(script.cell, script.tokenizer, ScriptedLlama)
    model.follow(script)

    def search(query: str) -> str:
        """
        Search.

        Args:
            query: what to look for

        Returns:
            what was found
        """
        searches.wait_for([query])
        return query

    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(folder, script, model, search)

    def observe(messages: list[dict[str, Any]]) -> list[int]:
        row, turn = row_and_turn(messages[0]["content"])
        return script.observations[row][turn]

    trainer._tokenize_prompts = lambda prompts: (script.prompts, None, {})
    trainer._get_tool_suffix_ids = observe
    trainer._sync_tool_dicts = [{"search": search} for _ in script.prompts]
    trainer._async_tool_dicts = [{} for _ in script.prompts]

    def roll_out() -> tuple[int, list[Interval]]:
        prompts = [[{"role": "user", "content": ""}] for _ in script.prompts]
        _, _, mask, *_ = trainer._generate(prompts)
        for row, sampled in enumerate(mask):
            if sum(sampled) != sum(script.turns[row]):
                raise RuntimeError(f"row {row} has sampled {sum(sampled)} tokens instead of {sum(script.turns[row])}")
        return model.prefilled_tokens, model.intervals

    return roll_out


def build_trainer(folder: str, script: Script, model: ScriptedLlama, search: Callable[[str], str]) -> Any:
    script.tokenizer.chat_template = files("trl").joinpath("chat_templates/qwen2_5.jinja").read_text()
    rows = len(script.prompts)
    config = GRPOConfig(
        folder,
        per_device_train_batch_size=rows,
        num_generations=rows,
        max_completion_length=script.limits.max_trajectory_tokens,
        **QUIET,
    )
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": ""}]}] * rows)
    return GRPOTrainer(
        model,
        lambda completions, **_: [0.0] * len(completions),
        config,
        data,
        processing_class=script.tokenizer,
        tools=[search],
    )


ENGINES: dict[str, Callable[[Script, ScriptedSearch], Rollout]] = {
    "trl_loop": trl_loop,
    **{build.__name__: partial(collect, build=build) for build in (lockstep, slots_event)},
    "engine_alone": partial(collect, build=slots_event),
    "endpoint": endpoint,
}


def measure(engine: str, cell: Cell) -> dict[str, Any]:
    """One row of the result. Only the rollout is measured: the model is there, and has been run once."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    script = Script(cell)
    search = ScriptedSearch(script)
    roll_out = ENGINES[engine](script, search)
    began, cpu_began = time.perf_counter(), time.process_time()
    prefilled_tokens, generating = roll_out()
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    calls = sum(map(len, script.turns))
    return {
        "cpu_seconds": cpu,
        "endpoint_ms_per_call": 1000 * cpu_of_thread("sorl-endpoint") / calls,
        "wall_seconds": wall,
        "prefilled_over_needed": prefilled_tokens / script.needed_tokens,
        "waiting_seconds": outside(search.intervals, generating),
    }


def cpu_of_thread(name: str) -> float:
    """The processor time of a thread of this process; 0 if there is none of this name."""
    found = (each.ident for each in threading.enumerate() if each.name == name)
    ident = next(found, None)
    return 0.0 if ident is None else time.clock_gettime(time.pthread_getcpuclockid(ident))


def outside(intervals: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Seconds that lie in at least one of `intervals` and in none of `others`."""
    return covered([*intervals, *others]) - covered(others)


def covered(spans: Sequence[Interval]) -> float:
    """Seconds that lie in at least one span."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
