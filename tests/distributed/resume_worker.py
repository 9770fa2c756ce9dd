"""Runs in every process of a launch: trains with real sampling, then goes on from its own checkpoints.

`accelerate launch --config_file … -m tests.distributed.resume_worker ddp_cpu case.json`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import set_seed

from sorl_trl import SOGRPOTrainer, SOPPOTrainer
from sorl_trl.search import BM25Index
from tests.agents import build_agent
from tests.distributed.cases import ENGINES
from tests.distributed.worker import engine_facts, suit_cpus, write_result

TRAINERS = {"so_grpo": SOGRPOTrainer, "so_ppo": SOPPOTrainer}
STEPS = 8
"""The last cycle begins after step 6, and its first step still has a learning rate: another order of prompts shows."""


def build(folder: Path, trainer: str, **options: Any) -> Any:
    """Cycles of two optimizer steps, epochs of four."""
    fields = {"per_device_train_batch_size": 4, "num_generations": 2, "num_iterations": 2, "steps_per_generation": 1}
    fields |= {"gradient_accumulation_steps": 1}
    fields |= {"max_steps": STEPS, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 1, **options}
    output = folder / "output"
    return build_agent(output, BM25Index.load(folder / "index"), TRAINERS[trainer], **fields)


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return {name: weight.clone() for name, weight in (state or {}).items()}


def continued(case: dict[str, Any], step: int, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a run that goes on after `step` logs, how far its weights end from `weights`, and which ranks kept
    trajectories in the checkpoint.
    """
    set_seed(1234)  # nothing may depend on where the first run left off
    folder = Path(case["folder"])
    checkpoint = folder / "output" / f"checkpoint-{step}"
    trainer = build(folder, case["trainer"], save_steps=100, target_kl=case["target_kl"])
    trainer.train(resume_from_checkpoint=str(checkpoint))
    distances = [float((weight - weights[name]).abs().max()) for name, weight in weights_of(trainer).items()]
    cycle = torch.load(checkpoint / f"generation_cycle_{trainer.args.process_index}.pt", weights_only=True)
    kept = gather_object([cycle["buffered_inputs"] is not None])
    return {"logs": trainer.state.log_history, "distance": max(distances, default=0.0), "kept": kept}


def main(config: str, path: str) -> None:
    case = json.loads(Path(path).read_text())
    suit_cpus()
    trainer = build(Path(case["folder"]), case["trainer"], target_kl=case["target_kl"])
    trainer.train()
    expected = ENGINES[config]
    facts = engine_facts(trainer)
    assert {name: facts[name] for name in expected} == expected, f"ran under {facts}, not {expected}"
    weights = weights_of(trainer)
    runs = {str(step): continued(case, step, weights) for step in case["steps"]}
    result = {"logs": trainer.state.log_history, "epoch": trainer.state.epoch, "resumed": runs}
    write_result(Path(case["folder"]), result)


if __name__ == "__main__":
    main(*sys.argv[1:])
