"""How far the dry run's estimate of memory is from what training takes: a policy of SmolLM2-135M's shape on the CPU.

    python -m benchmarks.memory_check

Each case trains in a process of its own: the peak of its resident memory over what it had before the policy was built,
beside the estimate. What is trained on does not matter, nor do the weights, so that they are random. Memory that is
freed goes back to the system at once (`MALLOC_MMAP_THRESHOLD_`), or the peak would hang on what malloc keeps. Writes
`benchmarks/results/memory.md` if no case is named.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.common import RESULTS, alone, build_model, table
from benchmarks.fixed_lengths import Sizes, Variant, build_trainer
from benchmarks.overhead import SMOL
from sorl_trl.cli.dry_run import estimate
from sorl_trl.command_line import Parser, run_command

SIZES = Sizes(hidden_size=576, layers=30, batch=4, prompt=120, turns=2, turn=8, observation=8, vocabulary=49152)
CASES: dict[str, tuple[Variant, dict[str, Any]]] = {
    "LoRA": (Variant(lora=True), {}),
    "all weights": (Variant(), {}),
    "all weights, no checkpointing": (Variant(), {"gradient_checkpointing": False}),
    "all weights, bfloat16 by autocast": (Variant(), {"bf16": True}),
}


def peak(name: str) -> tuple[float, float]:
    """Bytes of a rollout and its two updates: measured, and estimated."""
    variant, options = CASES[name]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy"
        build_model(**SMOL).save_pretrained(policy)
        before = psutil.Process().memory_info().rss
        trainer = build_trainer(variant, SIZES, policy, max_steps=2, **options)
        estimated = estimate(trainer.model, trainer.args, SIZES.prompt + SIZES.completion).peak
        trainer.train()  # the second update has all there is
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before, estimated


def main(words: Sequence[str]) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="case", help=f"some of: {', '.join(CASES)}")
    cases, rows = parser.parse_args(words).cases, []
    for name in cases or CASES:
        measured, estimated = alone({"MALLOC_MMAP_THRESHOLD_": str(2**20)}, peak, name)
        rows.append([name, f"{measured / 2**30:.2f}", f"{estimated / 2**30:.2f}", f"{estimated / measured:.2f}"])
        print(*rows[-1], flush=True)
    if not cases:
        columns = ["case", "measured, GiB", "estimated, GiB", "estimated / measured"]
        (RESULTS / "memory.md").write_text("# Memory: estimated and measured\n\n" + table(columns, rows))


if __name__ == "__main__":
    sys.exit(run_command(main))
