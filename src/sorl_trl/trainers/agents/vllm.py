"""Generation through TRL's vLLM, colocate and server mode. docs/vllm.md says what has been run on what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object

from sorl_trl.rollout import Generation, TurnEnd

# As many requests as TRL's client keeps connections for.
_REQUESTS_AT_ONCE = 64


class VLLMGenerator:
    """Samples with TRL's `VLLMGeneration`, which ends each row at a stop string and reports log-probabilities.

    A turn ends where `HFGenerator` would end it: vLLM is told to stop at the same end-of-sequence tokens and no other,
    and to show special tokens in the text in which it looks for stop strings.

    TRL's server mode hands out completions by the local number of prompts: all ranks therefore bring equally many rows
    (copies fill up, their generations are thrown away). The server is sent each row's own limit. A colocated engine
    takes one, the largest of all ranks, and each row is cut at its own.

    All ranks must build theirs together.
    """

    def __init__(self, vllm_generation: Any, end: TurnEnd) -> None:
        self._vllm = vllm_generation
        self._end = end
        self.window = _window(vllm_generation)
        """vLLM's `max_model_len`: a prompt with its continuation has at most so many tokens."""

    def generate(self, contexts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> list[Generation]:
        """See `sorl_trl.rollout.Generator`."""
        missing = max(gather_object([len(contexts)])) - len(contexts)
        prompts = [list(context) for context in (*contexts, *[contexts[-1]] * missing)]
        with self._turn_settings(gather_object([*max_new_tokens, *[1] * missing])):
            _, completion_ids, logprobs, _ = self._vllm.generate(prompts=prompts, images=None, num_generations=1)
        rows = list(zip(completion_ids, logprobs, max_new_tokens, strict=False))
        stopped = self._end.reached([ids[:limit] for ids, _, limit in rows])
        return [
            Generation(tuple(ids[:limit]), tuple(choices[0] for choices in row_logprobs[:limit]), has_stopped)
            for (ids, row_logprobs, limit), has_stopped in zip(rows, stopped, strict=True)
        ]

    @contextmanager
    def _turn_settings(self, limits: Sequence[int]) -> Iterator[None]:
        """TRL reads sampling parameters from an attribute: set them for one turn, then put them back.

        `limits` are those of all ranks, in their order.
        """
        vllm, saved = self._vllm, self._vllm.generation_kwargs
        client = getattr(vllm, "vllm_client", None)  # on the main process, in server mode
        vllm.generation_kwargs = {
            **(saved or {}),
            "max_tokens": max(limits),
            "stop": list(self._end.stop_strings),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "stop_token_ids": list(self._end.eos_token_ids),
            "ignore_eos": True,  # what vLLM itself takes for an end of sequence: the line above says what is
        }
        if client is not None:
            vllm.vllm_client = _OwnLimits(client, limits)
        try:
            yield
        finally:
            vllm.generation_kwargs = saved
            if client is not None:
                vllm.vllm_client = client


class _OwnLimits:
    """TRL's client for one turn: each row is sent with its own limit, rows of one limit in one request.

    vLLM's server refuses a request in which one row's context and limit together exceed the window.
    """

    def __init__(self, client: Any, limits: Sequence[int]) -> None:
        self._client = client
        self._rows_by_limit: dict[int, list[int]] = {}
        for row, limit in enumerate(limits):
            self._rows_by_limit.setdefault(limit, []).append(row)

    def generate(
        self, prompts: Sequence[list[int]], generation_kwargs: Mapping[str, Any], **parameters: Any
    ) -> dict[str, list[Any]]:
        """What TRL's client returns, for all rows in order."""

        def send(limit: int) -> dict[str, list[Any]]:
            own = [prompts[row] for row in self._rows_by_limit[limit]]
            return self._client.generate(
                prompts=own, generation_kwargs={**generation_kwargs, "max_tokens": limit}, **parameters
            )

        with ThreadPoolExecutor(min(len(self._rows_by_limit), _REQUESTS_AT_ONCE)) as pool:
            outputs = list(pool.map(send, self._rows_by_limit))
        order = [row for rows in self._rows_by_limit.values() for row in rows]
        by_key = {key: [value for output in outputs for value in output[key]] for key in outputs[0]}
        return {
            key: [value for _, value in sorted(zip(order, values, strict=True), key=lambda placed: placed[0])]
            for key, values in by_key.items()
        }


@contextmanager
def awake(vllm_generation: Any) -> Iterator[None]:
    """Keep a colocated engine with sleep mode awake, where TRL's `generate` would put it to sleep after every call.

    Each call would then wake it, send it all weights again and forget its prefix cache, in which the turns before are:
    here that happens once. However the block is left, the engine sleeps afterwards and TRL knows it.
    """
    vllm = vllm_generation
    if vllm.mode != "colocate" or not vllm.enable_sleep_mode:
        yield
        return
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


def _window(vllm_generation: Any) -> int:
    """Tokens that the engine reads; the server's main process is asked, and tells the others."""
    if vllm_generation.mode == "colocate":
        return int(vllm_generation.llm.llm_engine.model_config.max_model_len)
    told: list[Any] = [None]
    if vllm_generation.accelerator.is_main_process:
        client = vllm_generation.vllm_client
        told = [client._get(f"{client.base_url}/v1/models")["data"][0]["max_model_len"]]
    broadcast_object_list(told, from_process=0)
    return int(told[0])
