"""What the turn-level loss costs: an optimizer step of SOGRPOTrainer over one of trl.GRPOTrainer.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --device cuda

Both train copies of one small Llama on the same fixed multi-turn trajectories, whose old log-probabilities lie far
enough off for a good part of tokens and turns to be clipped; then on trajectories half as long as the batch is wide,
for TRL pads all micro-batches to the longest trajectory of their rollout. Steps are interleaved in one process, so
that the machine's moods meet both; time is the processor's. On a GPU the policy is larger and trains in bfloat16, and
time passes until the GPU is done. Writes `benchmarks/results/overhead.json` and `overhead.md`, or `overhead_cuda.…`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from benchmarks.small_model import build_model, build_tokenizer
from sorl_trl import SOGRPOConfig, SOGRPOTrainer
from sorl_trl.command_line import Parser, at_least, run_command
from sorl_trl.methods import SETTINGS

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Sizes:
    """A policy, and the trajectories it is trained on: lengths in tokens."""

    hidden_size: int = 256
    layers: int = 4
    batch: int = 8
    prompt: int = 64
    turns: int = 4
    turn: int = 64
    observation: int = 32
    vocabulary: int = 4096

    @property
    def completion(self) -> int:
        return self.turns * (self.turn + self.observation)


SIZES = {
    "cpu": Sizes(),
    "cuda": Sizes(hidden_size=1024, layers=16, prompt=256, turn=128, observation=256, vocabulary=32_000),
}
VARIANTS: dict[str, tuple[Any, Any, str | None, dict[str, Any]]] = {
    "GRPO": (GRPOTrainer, GRPOConfig, None, {"loss_type": "grpo"}),
    "SO-GRPO": (SOGRPOTrainer, SOGRPOConfig, "so_grpo", SETTINGS["so_grpo"]),
    "SO-GRPO, method grpo": (SOGRPOTrainer, SOGRPOConfig, "grpo", SETTINGS["grpo"]),
    "SO-GRPO, method sequence": (SOGRPOTrainer, SOGRPOConfig, "sequence", SETTINGS["sequence"]),
    "SO-GRPO, method st_grpo": (SOGRPOTrainer, SOGRPOConfig, "st_grpo", SETTINGS["st_grpo"]),
}
"""Title to trainer, its config, the method that it is given and the fields that this method sets."""


def build(variant: str, folder: str, sizes: Sizes = SIZES["cpu"], filled: float = 1.0, **options: Any) -> Any:
    """A trainer on a batch that is always the same; `options` are further fields of its config.

    `filled` is which part of the batch's width its trajectories fill.
    """
    trainer_class, config_class, method, settings = VARIANTS[variant]
    fields = {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": sizes.batch,
        "num_generations": sizes.batch,
        "max_completion_length": sizes.completion,
        "report_to": "none",
    }
    config = config_class(folder, **{**fields, **settings, **options})
    rows = Dataset.from_list([{"prompt": "3"}])
    trainer = trainer_class(
        build_model(sizes.hidden_size, sizes.layers, sizes.vocabulary),
        lambda prompts, **_: [0.0] * len(prompts),
        config,
        rows,
        processing_class=build_tokenizer(sizes.vocabulary),
        **({"method": method} if method else {}),
    )
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    batch = fixed_batch(trainer, sizes, filled)
    trainer._prepare_inputs = lambda _: batch
    return trainer


def fixed_batch(trainer: Any, sizes: Sizes, filled: float) -> dict[str, Any]:
    """Trajectories with observations between their turns, off-policy; on the trainer's device."""
    generator = torch.Generator().manual_seed(0)
    rows, length, unit = sizes.batch, sizes.completion, sizes.turn + sizes.observation
    completions = (torch.arange(length) < filled * length).long().expand(rows, length).contiguous()
    mask = torch.tensor(([1] * sizes.turn + [0] * sizes.observation) * sizes.turns) * completions
    turns = torch.arange(sizes.turns).repeat_interleave(unit).expand(rows, length)
    batch: dict[str, Any] = {
        "prompt_ids": torch.randint(3, sizes.vocabulary, (rows, sizes.prompt), generator=generator),
        "prompt_mask": torch.ones(rows, sizes.prompt, dtype=torch.long),
        "completion_ids": torch.randint(3, sizes.vocabulary, (rows, length), generator=generator),
        "completion_mask": completions,
        "tool_mask": mask,
        "turn_ids": torch.where(mask.bool(), turns, -1),
        "advantages": torch.randn(rows, generator=generator),
        "num_items_in_batch": mask.sum(),
    }
    device = trainer.accelerator.device
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    with torch.no_grad():
        ids, mask = (torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], 1) for name in ("ids", "mask"))
        logps, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length)
    per_turn = 0.3 * torch.randn(rows, sizes.turns, generator=generator).repeat_interleave(unit, dim=1)
    batch["old_per_token_logps"] = logps + (per_turn + 0.3 * torch.randn(logps.shape, generator=generator)).to(device)
    return batch


def step(trainer: Any) -> tuple[float, int]:
    """Seconds of one optimizer step, and on a GPU the bytes that it needed on top of what was there before."""
    on_gpu = trainer.accelerator.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    clock = time.perf_counter if on_gpu else time.process_time
    started = clock()
    trainer.training_step(trainer.model, None, None)
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    if not on_gpu:
        return clock() - started, 0
    torch.cuda.synchronize()
    return clock() - started, torch.cuda.max_memory_allocated() - before


def interleaved_steps(device: str, rounds: int, filled: float = 1.0) -> dict[str, list[tuple[float, int]]]:
    options = {"use_cpu": device == "cpu", "bf16": device == "cuda"}
    with tempfile.TemporaryDirectory() as folder:
        trainers = {variant: build(variant, folder, SIZES[device], filled, **options) for variant in VARIANTS}
        for trainer in trainers.values():
            step(trainer)
        steps: dict[str, list[tuple[float, int]]] = {variant: [] for variant in VARIANTS}
        for round_ in range(rounds):
            order = list(VARIANTS) if round_ % 2 == 0 else list(reversed(VARIANTS))
            for variant in order:
                steps[variant].append(step(trainers[variant]))
    return steps


def ratios(steps: dict[str, list[tuple[float, int]]], variant: str) -> dict[str, float]:
    return spread([a / b for (a, _), (b, _) in zip(steps[variant], steps["GRPO"], strict=True)])


def spread(values: list[float]) -> dict[str, float]:
    quartiles = statistics.quantiles(values, n=4)
    return {"median": statistics.median(values), "q25": quartiles[0], "q75": quartiles[2]}


def main(words: Sequence[str]) -> None:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=at_least(2), default=30, help="interleaved steps of each trainer")
    parser.add_argument("--device", choices=SIZES, default="cpu", help="where to train (default: %(default)s)")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    on_gpu = arguments.device == "cuda"
    steps, halves = (interleaved_steps(arguments.device, arguments.rounds, filled) for filled in (1.0, 0.5))
    rows = {
        variant: {
            "time_ratio": ratios(steps, variant),
            "time_ratio_half": ratios(halves, variant),
            "seconds": statistics.median(seconds for seconds, _ in steps[variant]),
            **({"memory_gib": max(needed for _, needed in steps[variant]) / 2**30} if on_gpu else {}),
        }
        for variant in VARIANTS
    }
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    result = {
        "time_ratio": rows["SO-GRPO"]["time_ratio"]["median"],
        "rounds": arguments.rounds,
        "device": device,
        "variants": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / ("overhead_cuda.json" if on_gpu else "overhead.json")
    path.write_text(json.dumps(result, indent=2) + "\n")
    where = device if on_gpu else "one thread"
    table = [
        "# What the loss costs" + (" on a GPU" if on_gpu else ""),
        "",
        f"Median over {arguments.rounds} interleaved steps, ratios step by step (quartiles); {where}.",
        "",
        "| trainer | step time over GRPO | in half of the width |" + (" memory of a step, GiB |" if on_gpu else ""),
        "|---|---|---|" + ("---|" if on_gpu else ""),
    ]
    for variant, row in rows.items():
        times = (row[name] for name in ("time_ratio", "time_ratio_half"))
        shown = [f"{each['median']:.3f} ({each['q25']:.3f} to {each['q75']:.3f})" for each in times]
        shown += [f"{row['memory_gib']:.2f}"] if on_gpu else []
        table.append(f"| {variant} | {' | '.join(shown)} |")
    text = "\n".join(table) + "\n"
    path.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    sys.exit(run_command(main))
