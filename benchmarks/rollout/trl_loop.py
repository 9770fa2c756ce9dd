"""TRL's own loop over tools, on the script of `benchmarks.rollout.script`.

What runs is `trl.GRPOTrainer`: its loop, its `model.generate`, its parsing of calls, its tools one after the other.
Scripted are what comes in (prompts and observations are token ids already) and where turns end.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import torch
from transformers import LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

from benchmarks.rollout.script import Interval, Script, build_model, query, row_and_turn, tool_call

if TYPE_CHECKING:
    from benchmarks.rollout.engines import Setting, Work


class ScriptedLlama(LlamaForCausalLM):
    """A Llama whose `generate` ends the turn of each row where the script says so, with a call of the tool."""

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


def trl_loop(setting: Setting) -> Callable[[], Work]:
    """TRL's way: all rows generate from their whole context, then their tools are called one after the other."""
    from benchmarks.rollout.engines import Work

    script = setting.script
    model = build_model(setting.cell, script.tokenizer, ScriptedLlama)
    model.follow(script)

    def search(query: str) -> str:
        """
        Search.

        Args:
            query: what to look for

        Returns:
            what was found
        """
        setting.search.wait_for([query])
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

    def roll_out() -> Work:
        prompts = [[{"role": "user", "content": ""}] for _ in script.prompts]
        _, _, mask, *_ = trainer._generate(prompts)
        for row, sampled in enumerate(mask):
            if sum(sampled) != sum(script.turns[row]):
                raise RuntimeError(f"row {row} has sampled {sum(sampled)} tokens instead of {sum(script.turns[row])}")
        return Work(model.prefilled_tokens, model.intervals)

    return roll_out


def build_trainer(folder: str, script: Script, model: ScriptedLlama, search: Callable[[str], str]) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    script.tokenizer.chat_template = files("trl").joinpath("chat_templates/qwen2_5.jinja").read_text()
    rows = len(script.prompts)
    config = GRPOConfig(
        folder,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=rows,
        num_generations=rows,
        max_completion_length=script.limits.max_trajectory_tokens,
        report_to="none",
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
