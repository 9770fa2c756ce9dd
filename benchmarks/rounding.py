"""How many turns does rounding alone put outside their clip range?

    python -m benchmarks.rounding

SmolLM2-135M (`make model`) scores trajectories of its own three times under bfloat16 autocast: packed, 24 in a
row; one by one; and in padded rows as TRL's, eight at a time. The policy is the same, so only rounding moves a turn's
ratio from 1. Writes `benchmarks/results/rounding.md`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import QUIET, RESULTS, table
from sorl_trl import SOGRPOConfig, SOGRPOTrainer
from sorl_trl.command_line import Parser, run_command
from sorl_trl.ops import importance_ratio, is_outside, turn_layout, turn_reduce

MODEL = "models/smollm2-135m"
PROMPT = "The history of the city began when"
TRAJECTORIES = 48
CASES = ((76, 6), (300, 2))
"""The tokens of a turn, and the most turns of a trajectory: the first has one, the second two, and so on in turn."""


def rollout(length: int, most: int, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
    """Trajectories of up to `most` turns, each of `length` sampled tokens, with a line break between them."""
    tokenizer, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model).eval()
    prompt, gap = tokenizer.encode(prompts[0]), tokenizer.encode("\n")
    context, turn_ids = torch.tensor([prompt] * len(prompts)), list[int]()
    for number in range(most):
        if number:
            context = torch.cat([context, torch.tensor([gap] * len(context))], 1)
            turn_ids += [-1] * len(gap)
        sampling = {"do_sample": True, "top_k": 0, "min_new_tokens": length, "max_new_tokens": length}
        context = model.generate(context, attention_mask=torch.ones_like(context), pad_token_id=0, **sampling)
        turn_ids += [number] * length
    model.train()
    sizes = [(1 + row % most) * (length + len(gap)) - len(gap) for row in range(len(prompts))]
    completions = [row[len(prompt) :][:size] for row, size in zip(context.tolist(), sizes, strict=True)]
    given = {"prompt_ids": [prompt] * len(prompts), "turn_ids": [turn_ids[:size] for size in sizes]}
    return {**given, "completion_ids": completions, "logprobs": None}


def measured(length: int, most: int, folder: str) -> Iterator[list[str]]:
    """The cells of two rows of the table."""
    sizes = {"per_device_train_batch_size": TRAJECTORIES, "num_generations": TRAJECTORIES}
    args = SOGRPOConfig(folder, **{**QUIET, "bf16": True}, **sizes, max_completion_length=most * (length + 1))
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    rows = [{"prompt": PROMPT}] * TRAJECTORIES
    trainer = SOGRPOTrainer(
        model.train(),
        lambda completions, **_: [0.0] * len(completions),
        args,
        Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        rollout_func=partial(rollout, length, most),
    )
    batch = trainer._generate_and_score_completions(rows)
    turns, clip_range = turn_layout(batch["turn_ids"]), args.epsilon / length**0.75
    with torch.no_grad():
        packed = trainer._forward(trainer.model, batch, layouts=["packed"], rows=24).logps.double()
        for name, layout, at_once in (("one by one", "unfolded", 1), ("padded, as TRL's", "rows", 8)):
            other = trainer._forward(trainer.model, batch, layouts=[layout], rows=at_once).logps.double()
            ratios = turn_reduce(importance_ratio(packed - other, turns, "turn"), turns)[turns.turn_mask]
            outside = int(is_outside(ratios, clip_range, clip_range).sum())
            shown = f"{outside} of {len(ratios)}", f"{clip_range:.1e}", f"{float((ratios - 1).abs().max()):.1e}"
            yield [str(length), name, *shown]


def main(words: Sequence[str]) -> None:
    Parser(description=(__doc__ or "").split("\n")[0]).parse_args(words)
    rows = []
    for length, turns in CASES:
        torch.manual_seed(1)
        with TemporaryDirectory() as folder:
            rows += measured(length, turns, folder)
    head = ("tokens of a turn", "packed against", "turns outside", "clip range", "farthest ratio from 1")
    page = (
        "# Rounding\n\nSmolLM2-135M scores trajectories of its own under bfloat16 autocast on a CPU, packed and "
        "otherwise.\nThe policy is the same, so only rounding moves a turn's ratio from 1.\n\n"
        f"{table(head, rows, left=2)}\n`python -m benchmarks.rounding`\n"
    )
    (RESULTS / "rounding.md").write_text(page)
    print(page)


if __name__ == "__main__":
    sys.exit(run_command(main))
