"""Generation for TRL's tool loop, over one engine that lives as long as the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

from sorl_trl.rollout import Engine, EngineOptions, Generation
from sorl_trl.trainers.agents.policy_engine import policy_engine

TRL = "trl"
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class ToolEngine:
    """Generates the turns of TRL's tool loop, which asks for all rows first, and then for those that called tools.

    TRL reads each context again and again from its first token, in batches padded to the longest. Where `tool_engine`
    says so, our engine generates instead: it is opened at the first question and closed when the loop has ended, and
    a row keeps its place in it, with what the model has read and written, while its tools run.

    vLLM generates by itself. With sleep mode, TRL wakes it for each question: here it stays awake for all of them.

    Args:
        trainer: a `GRPOTrainer`.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._stack = ExitStack()
        self._is_open = False
        self._engine: Engine | None = None
        self._any_active: Callable[[bool], bool] = bool
        self._held: list[list[int]] = []
        """What each row has read and written."""
        self._prompt_lengths: list[int] = []

    def generate(
        self, of_trl: Callable[..., Any], prompt_ids: list[list[int]], *args: Any, **kwargs: Any
    ) -> tuple[list[list[int]], Any]:
        """TRL's `_generate_single_turn`, for which `of_trl` stands in where there is nothing of ours to do."""
        if not self._is_open and self._trainer.tools and self._trainer.rollout_func is None:
            self._open(len(prompt_ids))
        if self._engine is None:
            completion_ids, logprobs = of_trl(prompt_ids, *args, **kwargs)
            return completion_ids, logprobs
        return self._turns(self._engine, prompt_ids), None

    def closing(self, run: Callable[Parameters, Result], together: bool = False) -> Callable[Parameters, Result]:
        """The same function, with the engine closed when it has ended, in whatever way.

        With `together`, which is for what every rank calls, ranks that share parameters go on polling until all have
        got there.
        """

        def closed_afterwards(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            failure: BaseException | None = None
            try:
                result = run(*args, **kwargs)
                while together and self._engine is not None and self._any_active(False):
                    self._poll(self._engine)
            except BaseException as error:  # TRL's contexts restore nothing when an exception passes through them
                failure = error
            self._close()
            if failure is not None:
                raise failure
            return result

        return closed_afterwards

    def _open(self, rows: int) -> None:
        self._is_open = True
        trainer = self._trainer
        if trainer.use_vllm:
            self._wake(trainer)
        elif _own_engine(trainer):
            options = EngineOptions(rollout_engine=trainer.args.tool_engine)
            of_tools = torch.is_grad_enabled()
            self._engine, self._any_active = self._stack.enter_context(policy_engine(trainer, (), options))
            self._stack.callback(self._engine.close)
            self._stack.enter_context(torch.set_grad_enabled(of_tools))  # tools may need gradients of their own
            self._engine.open(rows)
            self._held = []

    def _wake(self, trainer: Any) -> None:
        vllm = trainer.vllm_generation
        if vllm.mode == "colocate" and vllm.enable_sleep_mode:
            if trainer.state.global_step != trainer._last_loaded_step:  # as TRL does it: else it would do so again
                vllm.sync_weights()
                trainer._last_loaded_step = trainer.state.global_step
            self._stack.enter_context(_awake(vllm))

    def _close(self) -> None:
        self._is_open, self._engine, self._any_active = False, None, bool
        self._stack.close()

    def _poll(self, engine: Engine) -> list[tuple[int, Generation]]:
        with torch.no_grad():
            return engine.poll()

    def _turns(self, engine: Engine, contexts: Sequence[list[int]]) -> list[list[int]]:
        rows = self._rows_of(engine, contexts)
        limits = [self._limit(engine, row, len(context)) for row, context in zip(rows, contexts, strict=True)]
        for row, context, limit in zip(rows, contexts, limits, strict=True):
            if limit > 0:
                engine.submit(row, context, limit)
        written: dict[int, list[int]] = {row: [] for row in rows}
        while not engine.idle:
            self._any_active(True)
            written.update((row, list(generation.token_ids)) for row, generation in self._poll(engine))
        for row, context in zip(rows, contexts, strict=True):
            self._held[row] = [*context, *written[row]]
        return [written[row] for row in rows]

    def _rows_of(self, engine: Engine, contexts: Sequence[list[int]]) -> list[int]:
        """The row that each context goes on from. TRL does not say, but keeps their order."""
        if not self._held:
            self._held, self._prompt_lengths = [[] for _ in contexts], [len(context) for context in contexts]
            return [*range(len(contexts))]
        left = iter(enumerate(self._held))
        rows = []
        for context in contexts:
            rows.append(_next_row(left, context))
        for row in {*range(len(self._held))} - {*rows}:
            engine.release(row)
            self._held[row] = []
        return rows

    def _limit(self, engine: Engine, row: int, length: int) -> int:
        """TRL has a turn generate as much as a whole completion may hold, and cuts it: here it ends there."""
        room = self._trainer.max_completion_length - (length - self._prompt_lengths[row])
        if engine.window is None:
            return int(room)
        if length >= engine.window:
            raise ValueError(
                f"A context of {length} tokens fills the model, which reads {engine.window}. Leave out prompts that "
                f"are so long, or set `tool_engine={TRL!r}`."
            )
        return min(int(room), engine.window - length)


@contextmanager
def _awake(vllm: Any) -> Iterator[None]:
    """Keep a colocated engine awake, where TRL's `generate` would put it to sleep after every call.

    Each call would then wake it, send it all weights again and forget what it has cached of the turns before.
    """
    if vllm._llm_weights_sleeping:
        vllm.sync_weights()
    vllm.llm.wake_up(tags=["kv_cache"])
    vllm.enable_sleep_mode = False  # what TRL's `generate` asks, before it wakes the engine and after it has sampled
    try:
        yield
    finally:
        vllm.enable_sleep_mode = True
        vllm.llm.sleep(level=2)
        vllm._llm_weights_sleeping = True


def _own_engine(trainer: Any) -> bool:
    """Whether TRL's tool loop generates with an engine of ours."""
    args = trainer.args
    others = args.use_vllm or args.use_transformers_continuous_batching or trainer._is_vlm
    return bool(args.tool_engine != TRL and not others)


def _next_row(rows: Iterator[tuple[int, list[int]]], context: list[int]) -> int:
    for row, held in rows:
        if held and context[: len(held)] == held:
            return row
    raise RuntimeError("TRL's tool loop has asked for a context that goes on from none of its rows")
