"""Which models fit which GPU, by the estimate of `sorl train --dry_run`: `python -m benchmarks.memory_table`.

It needs neither a GPU nor weights: models have the shapes below, and no memory. Writes
`benchmarks/results/memory_table.md`, with the estimates for what has been measured on GPUs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import RESULTS, table
from sorl_trl import SOGRPOConfig
from sorl_trl.cli.dry_run import GIB, Memory, estimate

SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
QWEN3 = {
    "Qwen3-0.6B": (1024, 28, 16, 8, 3072),
    "Qwen3-1.7B": (2048, 28, 16, 8, 6144),
    "Qwen3-4B": (2560, 36, 32, 8, 9728),
    "Qwen3-8B": (4096, 36, 32, 8, 12288),
}
CONTEXTS = {"4k": 4096, "16k": 16384}
GPUS = {"24 GB": 23.5, "48 GB": 47.4, "80 GB": 79.1, "141 GB": 139.8}
"""About what torch finds on them, in GiB."""
VLLM_GIB = 2
"""What vLLM takes besides weights, keys and values: our guess."""
MEASURED = {
    "Qwen2.5-0.5B's shape, 8 x 4096 tokens, checkpointing, H200": (
        "qwen2",
        (896, 24, 14, 2, 4864),
        151936,
        4096,
        11.4,
    ),
    "SmolLM2-135M's shape, 8 x 4096 tokens, H200": ("llama", (576, 30, 9, 3, 1536), 49152, 4096, 30.2),
    "284 million parameters, 8 x 1792 tokens, H100": ("llama", (1024, 16, 16, 16, 3072), 32000, 1792, 17.0),
}
"""Shape, vocabulary, tokens of a trajectory, and the peak of a step in GiB: random weights, all trained."""
TEXT = """# Which model fits which GPU

Estimates by `sorl train --dry_run`, not measured: `python -m benchmarks.memory_table`.

{table}
- **context**: tokens of prompt, turns and observations together. A pass has one trajectory
  (`per_device_train_batch_size: 1`): four of 4k need about as much as one of 16k.
- **LoRA**: rank 32 in all linear layers, over weights in bfloat16. **all weights**: in float32, with `bf16`. Both with
  Adam and gradient checkpointing, without a reference model.
- **generating**: weights and the optimizer's state, beside vLLM on the same GPU, which sleeps during training. **of it
  vLLM**: weights, keys and values of eight whole trajectories, and {vllm} GiB, our guess: set
  `vllm_gpu_memory_utilization` to this over the GPU's memory.
- **fits**: in 90 % of the GPU's memory, because CUDA and fragmentation take a part. **tight**: in all of it, if vLLM
  holds no more than one whole trajectory at a time. **–**: does not fit.

What does not fit one GPU is sharded over several by [ZeRO](../../docs/how_to/scale.md#eight-gpus).

## Checked against what has been measured

{measured}
On a CPU, the estimate was [1.01 to 1.48 times](memory.md) the peak. Neither LoRA nor a model of this table has been
measured on a GPU.
"""


def build(kind: str, shape: tuple[int, ...], words: int, tied: bool, lora: bool = False) -> Any:
    named = dict(zip(SHAPE, shape, strict=True))
    config = AutoConfig.for_model(kind, **named, vocab_size=words, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if lora else torch.float32)
        return get_peft_model(model, LoraConfig(r=32, target_modules="all-linear")) if lora else model


def on_gpu(model: Any, tokens: int, gib: float, **options: Any) -> Memory:
    given = SOGRPOConfig("out", use_cpu=True, bf16=True, report_to="none", **options)
    gpu = {"device": torch.device("cuda"), "world_size": 1}
    return estimate(model, SimpleNamespace(**{**vars(given), **gpu}), tokens, gib * GIB)


def row(name: str, context: str, lora: bool) -> list[str]:
    """Of a trajectory in each pass, with vLLM on the same GPU, asleep in training."""
    model, tokens = build("qwen3", QWEN3[name], 151936, name != "Qwen3-8B", lora), CONTEXTS[context]
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "num_generations": 8}
    cache = on_gpu(model, tokens, 1e9, **sizes).rows["keys and values"] / GIB
    least = 2 * sum(each.numel() for each in model.parameters()) / GIB + VLLM_GIB

    def beside(vllm: float, gib: float) -> Memory:
        engine = {"use_vllm": True, "vllm_enable_sleep_mode": True, "vllm_gpu_memory_utilization": vllm / gib}
        return on_gpu(model, tokens, gib, **sizes, **engine)

    cells = []
    for gib in GPUS.values():
        needed, at_least = (beside(vllm, gib).peak / GIB for vllm in (least + cache, least + cache / 8))
        cells.append("fits" if needed < 0.9 * gib else "tight" if at_least < gib else "–")
    found = beside(least + cache, GPUS["141 GB"])
    shown = (found.training / GIB, found.generating / GIB, least + cache)
    return [name, context, "LoRA" if lora else "all weights", *(f"{each:.1f}" for each in shown), *cells]


def check(name: str) -> list[str]:
    kind, shape, words, tokens, measured = MEASURED[name]
    options = {"per_device_train_batch_size": 8, "gradient_checkpointing": "checkpointing" in name}
    found = on_gpu(build(kind, shape, words, words != 32000), tokens, GPUS["141 GB"], **options).training / GIB
    return [name, f"{measured:.1f}", f"{found:.1f}", f"{found / measured:.2f}"]


def main() -> None:
    columns = ["model", "context", "trained", "training, GiB", "generating, GiB", "of it vLLM", *GPUS]
    rows = [row(name, context, lora) for name in QWEN3 for context in CONTEXTS for lora in (True, False)]
    of_measured = ["all weights, bfloat16 by autocast", "measured, GiB", "estimated, GiB", "estimated / measured"]
    checked = table(of_measured, map(check, MEASURED), 1)
    text = TEXT.format(table=table(columns, rows, 3), measured=checked, vllm=VLLM_GIB)
    (RESULTS / "memory_table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
