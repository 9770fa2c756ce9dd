"""What a real vLLM needs to run in these tests, and nowhere else. None of it is for users: they have GPUs.

- The CPU backend packs linear weights when a model is loaded and drops the parameters, so that TRL's weight sync has
  nothing to load into: here they stay, and `torch.nn.functional.linear` multiplies. It packs the weights of experts,
  too, into which TRL would load unpacked ones: here each pass packs them.
- TRL does not hand on a dtype: "auto" makes bfloat16 of a float32 checkpoint, whose log-probabilities differ by more
  than 1e-4 anyway. Compilation takes a minute per engine. So engines are float32 and eager, and the cache is
  small.
- TRL's server mode sends weights by NCCL, between GPUs: here through a file (`weight_client.py`, `file_transfer.py`).
- Whenever vLLM has read only a part of a context it turns the request's random numbers back by a draw, and a generator
  on a CPU cannot do that (vLLM 0.30): here contexts are read in one step.
- Sleep mode exists on GPUs alone: here sleeping turns every weight into NaN, so that an engine that is not sent its
  weights again samples nothing sensible, and it is counted.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import Any

import torch

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the process of its trainer, as with TRL on a GPU
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
KV_CACHE_BYTES = 32 * 2**20
STARTED: list[Any] = []
"""The engines of this process."""


def keep_linear_weights() -> None:
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def keep_expert_weights() -> None:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    def packing(out: Any, states: Any, w13: Any, w2: Any, *others: Any) -> None:
        isa = others[5]
        packed = (ops.cpu_prepack_moe_weight(weight, isa) for weight in (w13, w2))
        ops.cpu_fused_moe(out, states, *packed, *others)

    cpu_moe.cpu_prepack_moe_weight = lambda weight, isa: weight
    cpu_moe.cpu_fused_moe = packing


def install() -> None:
    """Make TRL's wrapper work on the CPU, in this process."""
    keep_linear_weights()
    keep_expert_weights()
    from trl.generation import vllm_generation
    from vllm import LLM

    from sorl_trl.trainers import vllm_policy
    from tests.vllm.weight_client import FileWeightClient

    vllm_generation.LLM = partial(_start, LLM)
    vllm_policy.WeightClient = FileWeightClient


def _start(llm_class: Any, **arguments: Any) -> Any:
    sleeps = arguments.pop("enable_sleep_mode", False)
    exact = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": KV_CACHE_BYTES}
    llm = llm_class(**arguments, **exact)
    llm.llm_engine.vllm_config.scheduler_config.enable_chunked_prefill = False
    STARTED.append(llm)
    llm.counted = Counter[str]()
    if sleeps:
        llm.sleep, llm.wake_up = partial(_sleep, llm), partial(_wake, llm)
    return llm


def model_of(llm: Any) -> torch.nn.Module:
    model: torch.nn.Module = llm.llm_engine.model_executor.driver_worker.model_runner.model
    return model


def _sleep(llm: Any, level: int) -> None:
    llm.counted["sleep"] += 1
    for parameter in model_of(llm).parameters():
        parameter.data.fill_(math.nan)


def _wake(llm: Any, tags: list[str]) -> None:
    llm.counted[f"wake {tags[0]}"] += 1
