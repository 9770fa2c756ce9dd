"""Runs vLLM in the trainer's process, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import is_peft_model

from sorl_trl.agents.vllm.turns import Sampled, TurnRequest, VLLMEngine, sampling_settings
from sorl_trl.rollout import Generation, TurnEnd


@dataclass
class _Changes:
    """What a rank asks of the engine at a poll. The ids are those of its own requests."""

    given_up: list[str] = field(default_factory=list)
    submitted: dict[str, TurnRequest] = field(default_factory=dict)


class VLLMColocateEngine(VLLMEngine):
    """Samples with the engine that TRL's `VLLMGeneration` runs in this process, one engine step per poll.

    With sleep mode, a rollout wakes the engine and sends it the weights when it opens, and puts it to sleep when it
    closes. TRL's own `generate` does this at every call, and so loses the cache of earlier turns.

    Closing aborts unfinished requests: TRL's `generate` would continue them, and vLLM does not reset its cache while
    it has requests.

    With tensor parallelism, a group of ranks shares one engine: `polls_together` is True, and each poll first
    exchanges the requests of all ranks, so that all add and abort the same ones in the same order.
    """

    def __init__(self, vllm_generation: Any, end: TurnEnd) -> None:
        super().__init__(end, int(vllm_generation.llm.llm_engine.model_config.max_model_len))
        self._vllm = vllm_generation
        self._settings = sampling_settings(vllm_generation, end)
        self._rank = vllm_generation.accelerator.process_index
        self.polls_together = vllm_generation.tensor_parallel_size > 1
        self._changes = _Changes()
        self._own: dict[str, TurnRequest] = {}
        self._running: dict[str, None] = {}
        """The requests of all ranks that vLLM is working on, in the order in which it got them."""
        self._is_awake = False

    def open(self, rows: int) -> None:
        super().open(rows)
        self._changes, self._own, self._running = _Changes(), {}, {}
        vllm = self._vllm
        if vllm.enable_sleep_mode:
            if vllm._llm_weights_sleeping:
                vllm.sync_weights()
            vllm.llm.wake_up(tags=["kv_cache"])
            self._is_awake = True
        if self.polls_together and is_peft_model(vllm.model):
            # As TRL does before it generates: vLLM's collectives can hang beside those of a LoRA step.
            vllm.accelerator.wait_for_everyone()

    def submit(self, row: int, context_ids: Sequence[int], limit: int) -> None:
        request = self._begin(row, context_ids, limit)
        self._changes.submitted[self._name(request)] = request

    def poll(self) -> list[tuple[int, Generation]]:
        self._apply(self._exchanged())
        if not self._running:
            return []
        outputs = self._vllm.llm.llm_engine.step()
        self.work.steps += 1
        return sorted(self._ended(outputs), key=lambda ended: ended[0])

    def release(self, row: int) -> None:
        request = self._generating.pop(row, None)
        if request is None:
            return
        name = self._name(request)
        if self._changes.submitted.pop(name, None) is None:
            del self._own[name]
            self._changes.given_up.append(name)

    def close(self) -> None:
        llm = self._vllm.llm
        if self._running:
            llm.llm_engine.abort_request(list(self._running))
            # vLLM counts a block as cached once it is planned, but a failed step has not computed it.
            llm.reset_prefix_cache()
        self._running, self._generating = {}, {}
        if self._is_awake:
            self._is_awake = False
            llm.sleep(level=2)
            self._vllm._llm_weights_sleeping = True

    def _name(self, request: TurnRequest) -> str:
        return f"sorl-{self._rank}-{request.row}-{request.turn}"

    def _exchanged(self) -> list[_Changes]:
        """The changes of all ranks of the group, ordered by rank."""
        own, self._changes = self._changes, _Changes()
        self._own |= own.submitted
        if not self.polls_together:
            return [own]
        gathered: list[Any] = [None] * self._vllm.tensor_parallel_size
        torch.distributed.all_gather_object(gathered, own, group=self._vllm.tp_group)
        return gathered

    def _apply(self, changes: Sequence[_Changes]) -> None:
        engine = self._vllm.llm.llm_engine
        # A request may have ended in the very step after which it was given up.
        given_up = [name for each in changes for name in each.given_up if name in self._running]
        if given_up:
            engine.abort_request(given_up)
        for name in given_up:
            del self._running[name]
        for each in changes:
            for name, request in each.submitted.items():
                self._running[name] = None
                prompt = {"prompt_token_ids": list(request.context_ids)}
                engine.add_request(name, prompt, sampling_params(self._settings, request))

    def _ended(self, outputs: Sequence[Any]) -> Iterator[tuple[int, Generation]]:
        for output in outputs:
            self._running.pop(output.request_id, None)
            request = self._own.pop(output.request_id, None)
            if request is not None and (ended := self._finish(request, _sampled(output))) is not None:
                yield ended


def sampling_params(settings: dict[str, Any], request: TurnRequest) -> Any:
    """Make vLLM's own type from `settings`, for one turn."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    own: dict[str, Any] = {"max_tokens": request.limit, "seed": request.seed}
    if isinstance(described := settings.get("structured_outputs"), dict):
        own["structured_outputs"] = StructuredOutputsParams(**described)
    return SamplingParams(**settings | own, output_kind=RequestOutputKind.FINAL_ONLY)


def _sampled(output: Any) -> Sampled:
    (completion,) = output.outputs
    token_ids = tuple(completion.token_ids)
    logprobs = zip(completion.logprobs, token_ids, strict=True)
    return Sampled(
        token_ids,
        tuple(choices[token].logprob for choices, token in logprobs),
        completion.finish_reason,
        output.num_cached_tokens or 0,
    )
