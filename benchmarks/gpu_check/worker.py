"""What `engines.py` starts: trains under one engine, checks that it is that engine, and writes figures.

`accelerate launch --config_file … -m benchmarks.gpu_check.worker job.json`
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.critic_cost import VARIANTS
from benchmarks.gpu_check.records import Context
from benchmarks.gpu_check.training import build, check_moved, sizes_of, training_figures
from sorl_trl.trainers.critic.model import is_critic_name

ZERO_STAGES = {"zero2": 2, "zero3": 3}
VLLM_OPTIONS = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.2}
MEAN_DIFFERENCE = 0.05
"""Of log-probabilities in bfloat16, between vLLM and the trainer: far more means that vLLM has other weights."""


def build_nothing() -> None:
    """Keep DeepSpeed from compiling operations: it is told that none would run here."""
    import deepspeed
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    deepspeed.ops.__compatible_ops__ = dict.fromkeys([*ALL_OPS, "deepspeed_not_implemented"], False)


def engine_facts(trainer: Any) -> dict[str, Any]:
    """What the training really ran under: a wrong configuration falls back to less, silently."""
    engine = trainer.model_wrapped
    stage = engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else 0
    kinds = sorted({type(p.data).__name__ for p in trainer.model.parameters()})
    return {"processes": trainer.accelerator.num_processes, "zero_stage": stage, "parameters": kinds}


def check_engine(name: str, facts: dict[str, Any]) -> None:
    """Raise AssertionError unless the facts are those of the engine `name`."""
    assert facts["zero_stage"] == ZERO_STAGES.get(name, 0), f"ran under {facts}, not {name}"
    assert ("DTensor" in facts["parameters"]) == (name == "fsdp2"), f"ran under {facts}, not {name}"


def whole_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Gathered from wherever the engine keeps them, on the CPU."""
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return {name: weight.detach().cpu() for name, weight in state.items()}


def first_weights(policy: Path, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `weights` were before training, in their dtypes: the saved policy's, and 0 for a new critic's head."""
    saved = load_file(policy / "model.safetensors")
    return {
        name: torch.zeros_like(weight) if is_critic_name(name) else saved[name].to(weight.dtype)
        for name, weight in weights.items()
    }


def sampling_figures(log_history: list[dict[str, Any]]) -> dict[str, Any]:
    """How far the log-probabilities that vLLM reports are from the trainer's, rollout by rollout.

    Raises:
        AssertionError: it was not logged, or is more than bfloat16 explains.
    """
    name = "sampling/sampling_logp_difference"
    means = [entry[f"{name}/mean"] for entry in log_history if f"{name}/mean" in entry]
    assert len(means) > 1, f"`{name}/mean` was logged in {len(means)} steps: no update of vLLM's weights was seen"
    assert max(means) <= MEAN_DIFFERENCE, f"`{name}/mean` is {max(means):.3g}, more than {MEAN_DIFFERENCE}"
    largest = max(entry[f"{name}/max"] for entry in log_history if f"{name}/max" in entry)
    return {"logp_difference_means": means, "logp_difference_max": largest}


def train(context: Context, engine: str) -> dict[str, Any]:
    sizes = sizes_of(context)
    options: dict[str, Any] = {**context.precision}
    if context.device == "cpu":
        options["bf16"] = False  # the CPU's launch configurations have no mixed precision
    if engine == "vllm":
        options |= {**VLLM_OPTIONS, "vllm_max_model_length": sizes.prompt + sizes.completion + 16}
    variant = VARIANTS["so_grpo" if engine == "vllm" else "head"]
    trainer = build(variant, sizes, context.folder, **options)
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    facts = engine_facts(trainer)
    check_engine(engine, facts)
    weights = whole_weights(trainer)
    check_moved(first_weights(context.folder / "policy", weights), weights, critic=variant.critic is not None)
    figures = {**facts, **training_figures(trainer.state.log_history), "seconds": seconds}
    if context.device == "cuda":
        figures["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return figures | (sampling_figures(trainer.state.log_history) if engine == "vllm" else {})


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    folder = Path(path).parent
    if job["engine"] in ZERO_STAGES:
        build_nothing()
    context = Context(job["device"], job["small"], folder, deadline=float("inf"))
    figures = train(context, job["engine"])
    (folder / "result.part").write_text(json.dumps(figures))
    (folder / "result.part").replace(folder / "result.json")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
