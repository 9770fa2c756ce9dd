"""Generation through TRL's vLLM, colocate and server mode. Read against TRL 1.16; it needs a GPU to run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate.utils import gather_object

from sorl_trl.rollout import Generation


class VLLMGenerator:
    """Samples with TRL's `VLLMGeneration`, which ends each row at a stop string and reports log-probabilities.

    TRL's server mode hands out completions by the local number of prompts and sends one token limit, the main
    process's: all ranks therefore bring equally many rows (copies fill up, their generations are thrown away) and
    agree on the largest limit, and each row is cut at its own.
    """

    def __init__(self, vllm_generation: Any, stop_strings: Sequence[str]) -> None:
        self._vllm = vllm_generation
        self._stop_strings = list(stop_strings)

    def generate(self, contexts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> list[Generation]:
        """See `sorl_trl.rollout.Generator`."""
        sizes = gather_object([(len(contexts), max(max_new_tokens))])
        rows, limit = (max(column) for column in zip(*sizes, strict=True))
        prompts = [list(context) for context in contexts]
        prompts += [prompts[-1]] * (rows - len(prompts))
        with self._turn_settings(limit):
            _, completion_ids, logprobs, _ = self._vllm.generate(prompts=prompts, images=None, num_generations=1)
        return [
            self._generation(ids, [choices[0] for choices in row_logprobs], limit)
            for ids, row_logprobs, limit in zip(completion_ids, logprobs, max_new_tokens, strict=False)
        ]

    @staticmethod
    def _generation(ids: Sequence[int], logprobs: Sequence[float], limit: int) -> Generation:
        """vLLM ends a row at a stop string, at EOS, or at the call's limit.

        A row that stops with exactly its last allowed token counts as not stopped; its action is parsed all the same.
        """
        return Generation(tuple(ids[:limit]), tuple(logprobs[:limit]), stopped=len(ids) < limit)

    @contextmanager
    def _turn_settings(self, limit: int) -> Iterator[None]:
        """TRL reads limit and sampling parameters from attributes: set them for one turn, then put them back."""
        saved = self._vllm.max_completion_length, self._vllm.generation_kwargs
        self._vllm.max_completion_length = limit
        stops = {"stop": self._stop_strings, "include_stop_str_in_output": True}
        self._vllm.generation_kwargs = {**(saved[1] or {}), **stops}
        try:
            yield
        finally:
            self._vllm.max_completion_length, self._vllm.generation_kwargs = saved
