"""vLLM in this process, for `benchmarks.rollout`: its engine as a trainer would hand it to ours."""

from __future__ import annotations

import os
import tempfile
from types import SimpleNamespace
from typing import Any

from benchmarks.rollout_world import Script
from sorl_trl.rollout import Engine, TurnEnd

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""In the process that measures, and on one thread as all others."""


def build_engine(model: Any, script: Script) -> Engine:
    """Ours over vLLM's, which reads the model from a checkpoint. Weights are neither sent nor asleep in between."""
    os.environ.update(SETTINGS)
    from vllm import LLM

    from sorl_trl.trainers.agents.vllm.colocate import VLLMColocateEngine

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        script.tokenizer.save_pretrained(folder)
        llm = LLM(
            model=folder,
            dtype="float32",
            enforce_eager=True,
            max_model_len=4096,
            max_num_seqs=len(script.prompts),
            seed=0,
            disable_log_stats=True,
        )
    sampling = {"repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None}
    generation = SimpleNamespace(
        llm=llm,
        model=model,
        accelerator=SimpleNamespace(process_index=0),
        tensor_parallel_size=1,
        enable_sleep_mode=False,
        generation_kwargs=None,
        structured_outputs_regex=None,
        **sampling,
    )
    return VLLMColocateEngine(generation, TurnEnd(script.tokenizer, (), [script.tokenizer.eos_token_id]))
