"""What training costs: an optimizer step of SOGRPOTrainer over one of trl.GRPOTrainer.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --device cuda

Of the loss: both train copies of one small Llama on the same fixed multi-turn trajectories, whose old
log-probabilities lie far enough off for a good part of tokens and turns to be clipped; then on trajectories half as
long as the batch is wide, for TRL pads all micro-batches to the longest trajectory of their rollout.

Of the forward pass: trajectories of other shapes (`CASES`). TRL cannot train the turns of one of them, whose chat
template strips earlier thoughts; there, it trains the same turns without stripping.

Steps are interleaved in one process, so that the machine's moods meet both; time is the processor's. Peak memory is
what a step adds to the resident memory of a process of its own. On a GPU the policies train in bfloat16, that of the
loss is larger, time passes until the GPU is done, and memory is what the GPU has allocated. Writes
`benchmarks/results/overhead.json` and `overhead.md`, or `overhead_cuda.…`.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from benchmarks.common import QUIET, RESULTS, alone, build_model, build_tokenizer, descend, ready, table
from sorl_trl import SOGRPOConfig, SOGRPOTrainer
from sorl_trl.command_line import Parser, at_least, run_command
from sorl_trl.trainers.batch import GENERATED_AT

VARIANTS: dict[str, str | None] = {
    "GRPO": None,
    "SO-GRPO": "so_grpo",
    "SO-GRPO, method grpo": "grpo",
    "SO-GRPO, method st_grpo": "st_grpo",
}
"""Title to the method of `SOGRPOTrainer`; None for TRL's trainer."""


Parts = list[tuple[int, int, bool]]
"""A trajectory after its prompt: the context, the number of tokens and whether they are a turn, of each part."""


@dataclass(frozen=True)
class Case:
    """Trajectories of one shape, and the policy that is trained on them."""

    policy: dict[str, Any]
    prompts: list[int]
    """Lengths. A context other than the first begins with the prompt, and goes on with what it repeats."""
    rows: list[Parts]
    plain: list[Parts] | None = None
    """What TRL trains instead."""
    same_prompt: bool = False
    width: int = 0
    """Of the batch, where that is more than the longest trajectory."""
    off_policy: bool = False


SMALL = {"hidden_size": 256, "layers": 8, "vocabulary": 8192, "num_key_value_heads": 2, "intermediate_size": 688}
SMOL = {"hidden_size": 576, "layers": 30, "vocabulary": 49152, "num_key_value_heads": 3, "intermediate_size": 1536}
SMOL |= {"tie_word_embeddings": True}
LENGTHS = [512, 120, 61, 232, 98, 215, 140, 77]
"""Drawn once from a lognormal distribution (σ 0.6), of which the longest is the width."""


def alternating(length: int, unit: int = 32) -> Parts:
    """Turns and observations of `unit` tokens, in turn."""
    return [(0, min(unit, length - at), at // unit % 2 == 0) for at in range(0, length, unit)]


TURNS, THOUGHT, ACTION, SEEN, PROMPT = 8, 96, 16, 48, 128


def stripped() -> Parts:
    """Each turn in a context of its own, which repeats actions and observations, but no thoughts, of earlier ones."""
    repeated = [PROMPT + turn * (ACTION + SEEN) for turn in range(TURNS)]
    parts = [part for turn in range(TURNS) for part in ((turn, repeated[turn], False), (turn, THOUGHT + ACTION, True))]
    return parts[1:]


def kept() -> Parts:
    """The same turns in one context."""
    return [part for _ in range(TURNS) for part in ((0, THOUGHT + ACTION, True), (0, SEEN, False))][:-1]


def of_loss(policy: dict[str, Any], prompt: int, turn: int, seen: int, filled: float = 1.0, rows: int = 8) -> Case:
    """Four turns with an observation after each, in trajectories that fill a part of the batch's width."""
    parts = [(0, turn, True), (0, seen, False)] * round(4 * filled)
    return Case(policy, [prompt] * rows, [parts] * rows, width=4 * (turn + seen), off_policy=True)


CASES: dict[str, Case] = {
    "lognormal lengths": Case(SMALL, [64, 40, 51, 33, 60, 47, 38, 55], [alternating(each) for each in LENGTHS]),
    "equal lengths": Case(SMALL, [64] * 4, [alternating(384)] * 4),
    "one prompt, G = 8": Case(SMALL, [256] * 8, [[(0, 256, True)]] * 8, same_prompt=True),
    "stripped thoughts": Case(SMALL, [PROMPT] * 2, [stripped()] * 2, plain=[kept()] * 2),
    "kept thoughts": Case(SMALL, [PROMPT] * 2, [kept()] * 2),
    "SmolLM2-135M's shape": Case(SMOL, [32, 20, 27, 16], [alternating(each) for each in (192, 66, 107, 69)]),
}


LOSS = {
    "cpu": ({"hidden_size": 256, "layers": 4, "vocabulary": 4096}, 64, 64, 32),
    "cuda": ({"hidden_size": 1024, "layers": 16, "vocabulary": 32_000}, 256, 128, 256),
}
"""Device to the policy and the lengths that the loss is measured with."""


def build(variant: str, folder: str, case: Case, **options: Any) -> Any:
    """A trainer on the trajectories of a case, or on those that TRL trains instead; `options` go to its config."""
    rows = case.plain if case.plain is not None and variant == "GRPO" else case.rows
    batch = batch_of(case, rows)
    model = build_model(**case.policy)
    trainer = trainer_of(variant, folder, model, len(rows), batch["completion_ids"].size(1), **options)
    batch = {name: tensor.to(trainer.accelerator.device) for name, tensor in batch.items()}
    if case.off_policy:
        batch["old_per_token_logps"] = moved(trainer, batch)
    trainer._prepare_inputs = lambda _: batch
    return trainer


def moved(trainer: Any, batch: dict[str, Any]) -> torch.Tensor:
    """(B, T) log-probabilities so far off that a good part of tokens and turns is clipped."""
    ids, mask = (torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], 1) for name in ("ids", "mask"))
    shape, generator = batch["turn_ids"].shape, torch.Generator().manual_seed(1)
    with torch.no_grad():
        logps, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, shape[1])
    of_turns = torch.randn(shape, generator=generator).gather(1, batch["turn_ids"].cpu().clamp(min=0))
    return logps + 0.3 * (of_turns + torch.randn(shape, generator=generator)).to(logps.device)


def batch_of(case: Case, rows: list[Parts]) -> dict[str, Any]:
    """TRL's batch of trajectories, with prompts padded on the left."""
    generator = torch.Generator().manual_seed(0)

    def words(count: int) -> torch.Tensor:
        return torch.randint(3, case.policy["vocabulary"], (count,), generator=generator)

    width = max(case.prompts)
    length = max(case.width, *(sum(count for _, count, _ in parts) for parts in rows))
    shapes = {"prompt_ids": width, "prompt_mask": width} | dict.fromkeys(FIELDS, length)
    batch: dict[str, Any] = {
        name: torch.zeros(len(rows), columns, dtype=torch.long) for name, columns in shapes.items()
    }
    batch["turn_ids"] -= 1
    shared, repeated = words(width), words(length)
    for row, (size, parts) in enumerate(zip(case.prompts, rows, strict=True)):
        prompt = shared[:size] if case.same_prompt else words(size)
        batch["prompt_ids"][row, width - size :], batch["prompt_mask"][row, width - size :] = prompt, 1
        at = turn = 0
        for context, count, is_turn in parts:
            own = slice(at, at + count)
            is_repeated = context > 0 and not is_turn
            text = torch.cat([prompt, repeated])[:count] if is_repeated else words(count)
            batch["completion_ids"][row, own], batch["completion_mask"][row, own] = text, 1
            batch["context_ids"][row, own], batch["tool_mask"][row, own] = context, int(is_turn)
            if is_turn:
                batch["turn_ids"][row, own] = turn
                turn += 1
            at += count
    batch["advantages"] = torch.randn(len(rows), generator=generator)
    batch["num_items_in_batch"] = batch["tool_mask"].sum()
    batch[GENERATED_AT] = torch.tensor(-1)  # off-policy
    return batch


FIELDS = ("completion_ids", "completion_mask", "tool_mask", "context_ids", "turn_ids")
"""Of a batch, as wide as completions."""


def trainer_of(variant: str, folder: str, model: Any, rows: int, length: int, **options: Any) -> Any:
    """A trainer of `model` on micro-batches of so many rows, whose batch is still to be set."""
    method = VARIANTS[variant]
    fields = {
        **QUIET,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": rows,
        "num_generations": rows,
        "max_completion_length": length,
    }
    trainer_class: Any = GRPOTrainer if method is None else SOGRPOTrainer
    fields |= {"loss_type": "grpo"} if method is None else {}
    config_class: Any = GRPOConfig if method is None else SOGRPOConfig
    config = config_class(folder, **{**fields, **options})
    trainer = trainer_class(
        model,
        lambda prompts, **_: [0.0] * len(prompts),
        config,
        Dataset.from_list([{"prompt": "3"}]),
        processing_class=build_tokenizer(model.config.vocab_size),
        **({"method": method} if method else {}),
    )
    return ready(trainer)


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
    descend(trainer)
    if not on_gpu:
        return clock() - started, 0
    torch.cuda.synchronize()
    return clock() - started, torch.cuda.max_memory_allocated() - before


Steps = dict[str, list[tuple[float, int]]]
PAIR = ("GRPO", "SO-GRPO")
CASE_ROUNDS = 3
"""Interleaved steps of each trainer, in each case of the forward pass."""
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""What is freed is given back at once."""


def options_of(device: str) -> dict[str, Any]:
    return {"use_cpu": device == "cpu", "bf16": device == "cuda"}


def interleaved(trainers: dict[str, Any], rounds: int) -> Steps:
    for trainer in trainers.values():
        step(trainer)
    steps: Steps = {variant: [] for variant in trainers}
    for round_ in range(rounds):
        for variant in list(trainers) if round_ % 2 == 0 else reversed(list(trainers)):
            steps[variant].append(step(trainers[variant]))
    return steps


def steps_of_loss(device: str, rounds: int, filled: float) -> Steps:
    with tempfile.TemporaryDirectory() as folder:
        case = of_loss(*LOSS[device], filled)
        trainers = {variant: build(variant, folder, case, **options_of(device)) for variant in VARIANTS}
        return interleaved(trainers, rounds)


def row_of_case(name: str, device: str) -> dict[str, Any]:
    """Ratios of a step of SO-GRPO to one of TRL's: time, memory, and the part of TRL's width that is no padding."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        trainers = {variant: build(variant, folder, case, **options_of(device)) for variant in PAIR}
        batch = trainers["GRPO"]._prepare_inputs(None)
        masks = [batch[f"{part}_mask"].float() for part in ("prompt", "completion")]
        steps = interleaved(trainers, CASE_ROUNDS)
        del trainers
    ours, theirs = (
        max(needed for _, needed in steps[variant]) if device == "cuda" else alone(RETURNED, peak, name, variant)
        for variant in reversed(PAIR)
    )
    return {
        "fill": sum(mask.sum().item() for mask in masks) / sum(mask.numel() for mask in masks),
        "time_ratio": ratios(steps, "SO-GRPO"),
        "seconds": statistics.median(seconds for seconds, _ in steps["GRPO"]),
        "memory_ratio": ours / theirs,
        "memory_mb": theirs / 2**20,
    }


def peak(name: str, variant: str) -> int:
    """The bytes that a step adds to the resident memory of this process: the optimizer's state is already there."""

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(variant, folder, CASES[name], **options_of("cpu"))
        step(trainer)
        before = status("VmRSS:")
        Path("/proc/self/clear_refs").write_text("5")  # the highest mark begins anew
        step(trainer)
        return status("VmHWM:") - before


def ratios(steps: dict[str, list[tuple[float, int]]], variant: str) -> dict[str, float]:
    return spread([a / b for (a, _), (b, _) in zip(steps[variant], steps["GRPO"], strict=True)])


def spread(values: list[float]) -> dict[str, float]:
    quartiles = statistics.quantiles(values, n=4)
    return {"median": statistics.median(values), "q25": quartiles[0], "q75": quartiles[2]}


def main(words: Sequence[str]) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=at_least(2), default=30, help="interleaved steps of each trainer")
    parser.add_argument("--device", choices=LOSS, default="cpu", help="where to train (default: %(default)s)")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    on_gpu = arguments.device == "cuda"
    steps, halves = (steps_of_loss(arguments.device, arguments.rounds, filled) for filled in (1.0, 0.5))
    rows = {
        variant: {
            "time_ratio": ratios(steps, variant),
            "time_ratio_half": ratios(halves, variant),
            "seconds": statistics.median(seconds for seconds, _ in steps[variant]),
            **({"memory_gib": max(needed for _, needed in steps[variant]) / 2**30} if on_gpu else {}),
        }
        for variant in VARIANTS
    }
    del steps, halves
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    result = {
        "rounds": arguments.rounds,
        "case_rounds": CASE_ROUNDS,
        "device": device,
        "variants": rows,
        "cases": {name: row_of_case(name, arguments.device) for name in CASES},
    }
    path = RESULTS / ("overhead_cuda.json" if on_gpu else "overhead.json")
    path.write_text(json.dumps(result, indent=2) + "\n")
    text = report(result, on_gpu)
    path.with_suffix(".md").write_text(text)
    print(text)


REPORT = """# What training costs{on_gpu}

## The loss

Median over {rounds} interleaved steps, ratios step by step (quartiles); {where}.

{losses}
## The forward pass

SO-GRPO over GRPO, median over {case_rounds} interleaved steps; memory is the peak of a step.

{cases}"""


def report(result: dict[str, Any], on_gpu: bool) -> str:
    losses = [
        [variant, shown(row["time_ratio"]), shown(row["time_ratio_half"])]
        + ([f"{row['memory_gib']:.2f}"] if on_gpu else [])
        for variant, row in result["variants"].items()
    ]
    cases = [
        [name, f"{row['fill']:.2f}", f"{row['seconds']:.2f}", shown(row["time_ratio"]), f"{row['memory_ratio']:.2f}"]
        for name, row in result["cases"].items()
    ]
    columns = ["trainer", "step time over GRPO", "in half of the width", "memory of a step, GiB"]
    fill = "part of TRL's width that is no padding"
    return REPORT.format(
        **{**result, "cases": table(["trajectories", fill, "TRL's step, s", "step time", "memory"], cases)},
        on_gpu=" on a GPU" if on_gpu else "",
        where=result["device"] if on_gpu else "one thread",
        losses=table(columns if on_gpu else columns[:-1], losses),
    )


def shown(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.3f} ({ratio['q25']:.3f} to {ratio['q75']:.3f})"


if __name__ == "__main__":
    sys.exit(run_command(main))
