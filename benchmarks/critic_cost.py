"""What a critic costs: SO-PPO with each kind of critic over SO-GRPO with the same policy.

    python -m benchmarks.critic_cost

Every trainer goes through whole cycles: it generates the turns of one batch, scores it under the old policy, and
trains on it. `head` and `model` are compared with full fine-tuning, `adapter` with LoRA of the same rank.

Time is the processor's, of one thread that does all the work, in cycles interleaved in one process: neither other
programs nor the machine's moods change the ratios. Memory is what the tensors hold at the peak (weights, gradients,
optimizer state, activations), counted by torch for a larger policy, whose weights are most of it as in earnest;
`between_steps_mib` is what of it does not depend on the number of tokens. Writes `benchmarks/results/critic_cost.json`
and `critic_cost.md`.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch

from benchmarks.critic_cycles import Cycles, Sizes, Variant, save_policy
from benchmarks.small_model import LiveBytes
from sorl_trl.command_line import Parser, at_least, run_command

RESULTS = Path(__file__).parent / "results"


VARIANTS = {
    "so_grpo": Variant(),
    "so_grpo_lora": Variant(lora=True),
    "head": Variant("head"),
    "adapter": Variant("adapter", lora=True),
    "model": Variant("model"),
}
BASELINES = {"head": "so_grpo", "adapter": "so_grpo_lora", "model": "so_grpo"}


TIMED = Sizes(hidden_size=256, layers=4, batch=8)
WEIGHED = Sizes(hidden_size=768, layers=8, batch=2, turn=16, observation=8)


def interleaved_seconds(rounds: int, sizes: Sizes = TIMED) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each cycle of each variant, and the share of generation in them."""
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy"
        save_policy(sizes, policy)
        cycles = {name: Cycles(variant, sizes, policy) for name, variant in VARIANTS.items()}
        for each in cycles.values():
            each.run()
            each.rollout.seconds = 0.0
        for round_ in range(rounds):
            for name in list(VARIANTS)[:: 1 if round_ % 2 == 0 else -1]:
                seconds[name].append(cycles[name].run())
    generation = {name: each.rollout.seconds / sum(seconds[name]) for name, each in cycles.items()}
    return seconds, generation


def memory_mib(variant: Variant) -> dict[str, float]:
    """At the peak of one cycle (its first update makes the optimizer's state, its last has it all), and after it."""
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy"
        save_policy(WEIGHED, policy)
        cycle = Cycles(variant, WEIGHED, policy)
        model = cycle.trainer.model
        with LiveBytes([*model.parameters(), *model.buffers()]) as live:
            cycle.run()
            cycle.trainer._buffered_inputs = None
            gc.collect()
        return {"peak_mib": live.peak / 2**20, "between_steps_mib": live.now / 2**20}


def ratios(kind: str, seconds: dict[str, list[float]]) -> list[float]:
    """Quartiles of the kind's time over its baseline's, cycle by cycle."""
    pairs = zip(seconds[kind], seconds[BASELINES[kind]], strict=True)
    return statistics.quantiles([a / b for a, b in pairs], n=4)


def report(
    seconds: dict[str, list[float]],
    generation: dict[str, float],
    memory: dict[str, dict[str, float]],
    once: dict[str, list[float]],
) -> dict[str, Any]:
    """Per kind of critic, ratios to its baseline, those of time cycle by cycle; absolute values of all variants."""
    kinds = {}
    for kind, baseline in BASELINES.items():
        lower, median, upper = ratios(kind, seconds)
        kinds[kind] = {
            "baseline": baseline,
            "time_ratio": median,
            "time_ratio_q25": lower,
            "time_ratio_q75": upper,
            "one_update_time_ratio": ratios(kind, once)[1],
            "training_time_ratio": training_seconds(kind, seconds, generation)
            / training_seconds(baseline, seconds, generation),
            "memory_ratio": memory[kind]["peak_mib"] / memory[baseline]["peak_mib"],
        }
    absolute = {
        name: {"cycle_seconds": statistics.median(seconds[name]), "generation_share": generation[name], **memory[name]}
        for name in VARIANTS
    }
    settings = {"timed": asdict(TIMED), "weighed": asdict(WEIGHED), "gradient_checkpointing": True}
    return {**kinds, "absolute": absolute, "settings": {**settings, "cycles": len(seconds["head"]), "threads": 1}}


def training_seconds(name: str, seconds: dict[str, list[float]], generation: dict[str, float]) -> float:
    """Of all cycles, without generation."""
    return sum(seconds[name]) * (1 - generation[name])


def table(result: dict[str, Any]) -> str:
    lines = [
        "# What a critic costs",
        "",
        f"SO-PPO over SO-GRPO with the same policy: medians (quartiles) over {result['settings']['cycles']} "
        f"interleaved cycles of one rollout and {TIMED.updates} updates; one thread, gradient checkpointing.",
        "",
        "| critic | over | time | without generation | generation in that of the baseline | one update | memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, baseline in BASELINES.items():
        row = result[kind]
        over = "SO-GRPO, LoRA" if VARIANTS[baseline].lora else "SO-GRPO"
        share = result["absolute"][baseline]["generation_share"]
        lines.append(
            f"| `{kind}` | {over} "
            f"| {row['time_ratio']:.2f} ({row['time_ratio_q25']:.2f} to {row['time_ratio_q75']:.2f}) "
            f"| {row['training_time_ratio']:.2f} | {share:.0%} | {row['one_update_time_ratio']:.2f} "
            f"| {row['memory_ratio']:.2f} |"
        )
    lines += [
        "",
        "The column before the last is the time with one update per rollout: TRL then does not score it under the old "
        "policy, and SO-PPO makes a forward pass of its own for the old values.",
    ]
    return "\n".join(lines) + "\n"


def main(words: Sequence[str]) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cycles", type=at_least(2), default=8, help="interleaved cycles of each trainer, at least 2")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    memory = {name: memory_mib(variant) for name, variant in VARIANTS.items()}
    once, _ = interleaved_seconds(arguments.cycles, replace(TIMED, updates=1))
    result = report(*interleaved_seconds(arguments.cycles), memory, once)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "critic_cost.json").write_text(json.dumps(result, indent=2) + "\n")
    (RESULTS / "critic_cost.md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    sys.exit(run_command(main))
