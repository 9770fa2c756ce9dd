"""What each correction of an engine's mismatch keeps of long trajectories: a real vLLM against a float32 trainer.

    make .venv-vllm/.installed
    .venv-vllm/bin/python -m benchmarks.engine_mismatch              # all of it: minutes
    .venv-vllm/bin/python -m benchmarks.engine_mismatch --report     # only writes the tables again

vLLM's CPU backend generates in the process of the trainer, from the checkpoint that the trainer starts with. Three
engines sample: one in float32, one in bfloat16, and that one once the trainer has made eight updates that it was not
sent, as happens to a rollout that an asynchronous engine had begun. Each samples trajectories of a policy that
practised the working world, in turns of 41 and 76 tokens. The trainer then scores the very same trajectories once per
correction: TRL's own code for its modes, ours for those per turn. Only what is counted is formed here.

Writes `benchmarks/results/engine_mismatch.json` and `.md`.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

import torch
from transformers import AutoTokenizer

from benchmarks.mismatch_report import write_report
from benchmarks.worlds import WorkingWorld
from benchmarks.worlds.world import POLICY
from sorl_trl import SOGRPOConfig, SOGRPOTrainer
from sorl_trl.command_line import Parser, run_command
from sorl_trl.ops import turn_layout, turn_mismatch
from sorl_trl.sandbox import PolicyConfig
from sorl_trl.trainers.loss.micro_batch import loss_mask_of
from sorl_trl.trainers.loss.mismatch import mismatch_log_ratio

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs/stability"
RESULTS = Path(__file__).parent / "results"
FIGURES = RESULTS / "engine_mismatch.json"
SEED = 201
HEADS = PolicyConfig(96, 2, 3)
"""Three heads of 32, the least width that vLLM's CPU kernels take; otherwise the working world's policy."""
WORLDS = {
    verbosity: WorkingWorld("Working", f"turns of {verbosity} tokens", verbosity, policy=HEADS)
    for verbosity in (40, 80)
}
TRAJECTORIES = 128
UPDATES = 8
LEARNING_RATE = 3e-4
"""The working world's, in its regimes of reuse and of late rollouts."""


@dataclass(frozen=True)
class Correction:
    """One way to weigh what another engine sampled; `None` is no bound."""

    title: str
    mode: str
    low: float | None = None
    high: float | None = None
    veto: float | None = None


CORRECTIONS = (
    Correction("TRL's default: sequence_mask, 3", "sequence_mask", high=3.0),
    Correction("sequence_truncate, 3", "sequence_truncate", high=3.0),
    Correction("token_mask, 3", "token_mask", high=3.0),
    Correction("token_truncate, 3", "token_truncate", high=3.0),
    Correction("token_truncate, 2, and veto 1e-4", "token_truncate", high=2.0, veto=1e-4),
    Correction("turn_mask, 0.99–1.01 (SkyRL's)", "turn_mask", 0.99, 1.01),
    Correction("turn_mask, 0.8–1.2 (ROLL's)", "turn_mask", 0.8, 1.2),
    Correction("turn_mask, 0.5–2 (slime's)", "turn_mask", 0.5, 2.0),
    Correction("turn_truncate, 2 (slime's)", "turn_truncate", high=2.0),
)
"""TRL's four, and ours per turn with the bounds that public implementations have, of segments or sequences."""
ENGINES = {
    "float32": ("float32", 0),
    "bfloat16": ("bfloat16", 0),
    f"bfloat16, {UPDATES} updates behind": ("bfloat16", UPDATES),
}
"""dtype of the engine, and updates that it was not sent."""


class Replayed:
    """A `rollout_func` that samples once, and gives the same trajectories from then on."""

    def __init__(self, rollout: Any) -> None:
        self._rollout = rollout
        self._sampled: Any = None

    def __call__(self, prompts: list[Any], trainer: Any) -> Any:
        if self._sampled is None:
            self._sampled = self._rollout(prompts, trainer)
        return copy.deepcopy(self._sampled)

    def forget(self) -> None:
        self._sampled = None


def build_trainer(world: WorkingWorld, folder: Path, dtype: str) -> tuple[Any, Replayed]:
    """A trainer and its rollout; the colocated engine reads its weights from the checkpoint, and is sent none."""
    from trl.generation import vllm_generation
    from vllm import LLM

    vllm_generation.LLM = partial(LLM, dtype=dtype, enforce_eager=True, kv_cache_memory_bytes=2**29)
    arguments = world.trainer_arguments(folder)
    arguments["rollout_func"] = replayed = Replayed(arguments["rollout_func"])
    config = SOGRPOConfig(
        output_dir=str(folder / "mismatch"),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=2 * world.max_completion_length,
        vllm_importance_sampling_correction=True,
        per_device_train_batch_size=TRAJECTORIES // UPDATES,
        steps_per_generation=UPDATES,
        num_generations=8,
        max_steps=UPDATES,
        max_completion_length=world.max_completion_length,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        target_kl=0.0,
        seed=SEED,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / POLICY)
    trainer = SOGRPOTrainer(model=str(folder / POLICY), args=config, processing_class=tokenizer, **arguments)
    trainer.model.float().train()  # a batch to train on, not to evaluate
    return trainer, replayed


def score(trainer: Any, examples: list[dict[str, Any]], correction: Correction) -> dict[str, Any]:
    """The batch that the trainer makes of the trajectories with a correction."""
    trainer.args.vllm_importance_sampling_mode = correction.mode
    of_trl = correction.mode if not correction.mode.startswith("turn_") else "token_truncate"
    trainer.vllm_importance_sampling_mode = of_trl
    trainer.vllm_importance_sampling_clip_min = correction.low
    trainer.vllm_importance_sampling_clip_max = correction.high
    trainer.args.mismatch_veto = correction.veto
    trainer._last_loaded_step = trainer.state.global_step  # the engine is sent nothing
    batch: dict[str, Any] = trainer._generate_and_score_completions(copy.deepcopy(examples))
    return batch


def count(batch: dict[str, Any], everything: torch.Tensor) -> dict[str, Any]:
    """What a correction keeps: (B,) trajectories by length, and means.

    Args:
        batch: as `score` made it.
        everything: (B, T) bool, the model tokens before any was dropped.
    """
    weights = batch["importance_sampling_ratio"].expand_as(everything) * loss_mask_of(batch)
    kept = (weights > 0) & everything
    turns = turn_layout(torch.where(kept, batch["turn_ids"], -1))
    of_row = kept.sum(1) / everything.sum(1).clamp(min=1)
    return {
        "tokens_kept": (kept.sum() / everything.sum()).item(),
        "trajectories_whole": (of_row == 1).float().mean().item(),
        "trajectories_gone": (of_row == 0).float().mean().item(),
        "kept_by_trajectory": [round(share, 3) for share in of_row.tolist()],
        "turns": int(turns.turn_mask.sum()),
        "weight_mean": weights[kept].mean().item() if kept.any() else None,
        "weight_min": weights[kept].min().item() if kept.any() else None,
        "weight_max": weights[kept].max().item() if kept.any() else None,
        "effective_share": (weights.sum() ** 2 / (weights**2).sum() / everything.sum()).item() if kept.any() else 0.0,
    }


def measure(trainer: Any, engine: str) -> dict[str, Any]:
    """All corrections of one engine's trajectories."""
    examples = [trainer.train_dataset[i // 8] for i in range(TRAJECTORIES)]
    plain = score(trainer, examples, CORRECTIONS[0])
    everything = plain["turn_ids"] >= 0
    difference = mismatch_log_ratio(plain)
    of_turns = turn_mismatch(difference, plain["turn_ids"]).log().abs()
    present = turn_layout(plain["turn_ids"]).turn_mask
    lengths = everything.sum(1)
    return {
        "engine": engine,
        "tokens": lengths.tolist(),
        "turns": int(present.sum()),
        "tokens_per_turn": (everything.sum() / present.sum()).item(),
        "mean_difference": difference[everything].abs().mean().item(),
        "max_difference": difference[everything].abs().max().item(),
        "max_turn_difference": of_turns[present].max().item(),
        "sum_by_trajectory": [round(total, 8) for total in difference.sum(1).tolist()],
        "reward": trainer._metrics["train"]["reward"][-1],
        "corrections": [{**asdict(each), **count(score(trainer, examples, each), everything)} for each in CORRECTIONS],
    }


def measure_world(world: WorkingWorld, workers: Path) -> list[dict[str, Any]]:
    """All engines in one world; the engine is shut down when its dtype has been measured."""
    folder = world.prepare(SEED, workers)
    found = []
    for dtype in dict.fromkeys(dtype for dtype, _ in ENGINES.values()):
        trainer, rollout = build_trainer(world, folder, dtype)
        for engine, (of_engine, updates) in ENGINES.items():
            if of_engine != dtype:
                continue
            rollout.forget()
            if updates:
                trainer._last_loaded_step = trainer.state.global_step
                trainer.train()
                rollout.forget()
            found.append({"world": world.description, **measure(trainer, engine)})
        trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()
    return found


def main(words: Sequence[str]) -> None:
    parser = Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="measure nothing")
    if not parser.parse_args(words).report:
        torch.set_num_threads(1)
        found = [each for world in WORLDS.values() for each in measure_world(world, RUNS)]
        FIGURES.write_text(json.dumps({"seed": SEED, "settings": found}) + "\n")
    write_report(json.loads(FIGURES.read_text()), RESULTS / "engine_mismatch.md")
    print(f"The table is in {RESULTS / 'engine_mismatch.md'}.")


if __name__ == "__main__":
    sys.exit(run_command(main))
