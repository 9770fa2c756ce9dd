"""Runs in every process of a launch: trains cases of SO-PPO one after the other and writes what came out.

`accelerate launch --config_file … -m tests.distributed.ppo_worker zero3_cpu case.json`
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import set_seed
from transformers.modeling_layers import GradientCheckpointingLayer

from sorl_trl.trainers.critic import is_critic_name
from tests.distributed.cases import record_turns
from tests.distributed.ppo_cases import SAVED_STEP, STEPS_PER_ROLLOUT, PPOCase, build_trainer
from tests.distributed.worker import checked_facts, suit_cpus, write_result


def run_case(case: PPOCase, folder: Path, config: str) -> dict[str, Any]:
    """Train, check what it ran under, write the weights; then go on from a checkpoint, if the case is about that."""
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"  # the case before may have been in bfloat16
    try:
        trainer = build_trainer(case, folder)
    except ValueError as error:
        return {"refused": str(error)}
    turns = record_turns(trainer)
    trainer.train()
    facts = checked_facts(trainer, config)
    # FSDP trains float32 weights, of which it computes with copies in bfloat16.
    held = "float32" if facts["engine"] == "FSDP2" else case.dtype
    assert getattr(torch, held) in {p.dtype for p in trainer.model.parameters()}
    first, second = gather_object([turns])
    assert all(a < b for a, b in zip(first, second, strict=True)), f"turns on both ranks: {first}, {second}"
    write_weights(trainer, folder / case.name)
    result = {**facts, "logs": trainer.state.log_history, "reentrant": reentrant(trainer.model)}
    if case.is_resumed:
        result |= go_on(case, folder)
    return result


def reentrant(model: torch.nn.Module) -> bool | None:
    """Which gradient checkpointing all layers of policy and critic have in the end; None for none."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    (kind,) = {
        layer._gradient_checkpointing_func.keywords["use_reentrant"] if layer.gradient_checkpointing else None
        for layer in layers
    }
    return kind


def go_on(case: PPOCase, folder: Path) -> dict[str, Any]:
    """Resume in a trainer of its own, then from a copy of the checkpoint without its critic."""
    saved = folder / case.name / f"checkpoint-{SAVED_STEP}"
    incomplete = folder / f"{case.kind}-incomplete" / saved.name
    if torch.distributed.get_rank() == 0:
        shutil.copytree(saved, incomplete, ignore=shutil.ignore_patterns("critic"), dirs_exist_ok=True)
    torch.distributed.barrier()
    trainer = resume(case, folder, saved)
    write_weights(trainer, folder / case.name / "resumed")
    try:
        resume(case, folder, incomplete)
    except ValueError as error:
        return {"resumed_logs": trainer.state.log_history, "refused": str(error)}
    return {"resumed_logs": trainer.state.log_history}


def resume(case: PPOCase, folder: Path, checkpoint: Path) -> Any:
    set_seed(1234)  # nothing may depend on where the first run left off
    trainer = build_trainer(case, folder)
    trainer.args.save_strategy = "no"
    trainer.rollout_func.calls = SAVED_STEP // STEPS_PER_ROLLOUT
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return trainer


def write_weights(trainer: Any, folder: Path) -> None:
    """`policy.pt` and `critic.pt` in float32, whole, under the names that the trained model gives them."""
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if not trainer.accelerator.is_main_process:
        return
    folder.mkdir(exist_ok=True, parents=True)
    for name, belongs in (("policy", policy_name), ("critic", is_critic_name)):
        own: dict[str, torch.Tensor] = {key: w.float().clone() for key, w in weights.items() if belongs(key)}
        torch.save(own, folder / f"{name}.pt")


def policy_name(name: str) -> bool:
    return not is_critic_name(name)


def main(config: str, path: str) -> None:
    given = json.loads(Path(path).read_text())
    suit_cpus()
    folder = Path(given["folder"])
    results = {}
    for fields in given["cases"]:
        case = PPOCase(**fields)
        print(f"=== {case.name}", flush=True)
        results[case.name] = run_case(case, folder, config)
    write_result(folder, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
