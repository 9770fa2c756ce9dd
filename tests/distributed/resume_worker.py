"""Runs in every process of a launch: trains with real sampling, then goes on from what it has left.

`accelerate launch --config_file … -m tests.distributed.resume_worker ddp_cpu case.json`
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback, set_seed

from sorl_trl import SOGRPOTrainer, SOPPOTrainer
from sorl_trl.rollout.engines.vllm import EngineUnavailable
from sorl_trl.search import BM25Index
from sorl_trl.trainers.late_rollouts import PolicyCopies
from tests.agents import Slow, build_agent
from tests.distributed.cases import ResumeCase
from tests.distributed.worker import checked_facts, suit_cpus, write_result

TRAINERS = {"so_grpo": SOGRPOTrainer, "so_ppo": SOPPOTrainer}
STEPS = 8
"""The last cycle begins after step 6, and its first step still has a learning rate: another order of prompts shows."""


def build(case: ResumeCase, **options: Any) -> Any:
    """Cycles of two optimizer steps, epochs of four."""
    fields = {"per_device_train_batch_size": 4, "num_generations": 2, "num_iterations": 2, "steps_per_generation": 1}
    fields |= {"gradient_accumulation_steps": 1, "target_kl": case.target_kl}
    fields |= {"max_steps": STEPS, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 1, **options}
    folder = Path(case.folder)
    return build_agent(folder / "output", BM25Index.load(folder / "index"), TRAINERS[case.trainer], **fields)


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return {name: weight.clone() for name, weight in (state or {}).items()}


def exactly(config: str, case: ResumeCase) -> dict[str, Any]:
    """Train, and go on from some checkpoints."""
    trainer = build(case)
    trainer.train()
    checked_facts(trainer, config)
    weights = weights_of(trainer)
    runs = {str(step): continued(case, step, weights) for step in case.steps}
    return {"logs": trainer.state.log_history, "epoch": trainer.state.epoch, "resumed": runs}


def continued(case: ResumeCase, step: int, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a run that goes on after `step` logs, how far its weights end from `weights`, and which ranks kept
    trajectories in the checkpoint.
    """
    set_seed(1234)  # nothing may depend on where the first run left off
    checkpoint = Path(case.folder) / "output" / f"checkpoint-{step}"
    trainer = build(case, save_steps=100)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    distances = [float((weight - weights[name]).abs().max()) for name, weight in weights_of(trainer).items()]
    cycle = torch.load(checkpoint / f"generation_cycle_{trainer.args.process_index}.pt", weights_only=True)
    kept = gather_object([cycle["buffered_inputs"] is not None])
    return {"logs": trainer.state.log_history, "distance": max(distances, default=0.0), "kept": kept}


def build_ahead(folder: Path, asked: list[Any], order: str, save: str = "no") -> Any:
    """A rollout for each optimizer step, one ahead; `asked` gets the prompts of each that is trained on."""
    fields: dict[str, Any] = {"per_device_train_batch_size": 4, "num_generations": 2, "steps_per_generation": 1}
    fields |= {"num_iterations": 1, "gradient_accumulation_steps": 1, "max_steps": 6, "async_staleness": 1}
    fields |= {"save_strategy": save, "save_steps": 100, "async_order": order}
    search = Slow(BM25Index.load(folder / "index"), 0.5, every=4)  # longer than a few optimizer steps
    search.thread_safe = False
    trainer = build_agent(folder / order, search, **fields)
    calculate = trainer._calculate_rewards

    def noted(rows: Any, prompts: list[Any], *others: Any) -> Any:
        asked.append(list(prompts))  # of the rows that are trained on, which may have overtaken the dataloader's
        return calculate(rows, prompts, *others)

    trainer._calculate_rewards = noted
    return trainer


class Dies(TrainerCallback):  # type: ignore[misc]
    """The engine of the second process is gone after the third step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3 and args.process_index == 1:
            PolicyCopies.engine = refuse


def refuse(*args: Any) -> Any:
    raise EngineUnavailable("connection refused")


def without_an_engine(config: str, case: ResumeCase) -> dict[str, Any]:
    """In either order: the engine of one process is gone, and the run goes on from what it left."""
    return {order: _without_an_engine(config, Path(case.folder), order) for order in ("dataset", "completed")}


def _without_an_engine(config: str, folder: Path, order: str) -> dict[str, Any]:
    engine, whole, asked, message = PolicyCopies.engine, list[Any](), list[Any](), ""
    build_ahead(folder, whole, order).train()
    trainer = build_ahead(folder, asked, order, save="steps")
    trainer.add_callback(Dies())
    try:
        trainer.train()
    except EngineUnavailable as error:
        message = str(error)
    PolicyCopies.engine = engine
    checked_facts(trainer, config)
    build_ahead(folder, asked, order).train(resume_from_checkpoint="latest")
    return {"message": gather_object([message]), "asked": gather_object([asked]), "whole": gather_object([whole])}


def without_shared_storage(config: str, case: ResumeCase) -> dict[str, Any]:
    """Each machine has a folder of its own."""
    folder = Path(case.folder)
    trainer = build(case)
    trainer.train()
    checked_facts(trainer, config)
    checkpoint = str(folder / "output" / "checkpoint-1")
    result = {"logs": trainer.state.log_history}
    result["in_pieces"] = refusals(lambda: trainer.train(resume_from_checkpoint=checkpoint))
    weights = weights_of(trainer)
    copy_together(folder, "checkpoint-1")
    result["resumed"] = continued(case, 1, weights)
    return {**result, "collects": steps_without_a_cycle(case, "checkpoint-3")}


def refusals(attempt: Callable[[], Any]) -> list[str]:
    """What each process raises."""
    try:
        attempt()
    except ValueError as error:
        return gather_object([str(error)])
    raise AssertionError("nothing was refused")


def copy_together(folder: Path, checkpoint: str) -> None:
    """Every machine gets all pieces: what a user does by hand."""
    folders: list[Path] = [Path(each) for each in gather_object([str(folder)])]
    if torch.distributed.get_rank() == 0:
        for source, target in (folders, folders[::-1]):
            shutil.copytree(source / "output" / checkpoint, target / "output" / checkpoint, dirs_exist_ok=True)
    torch.distributed.barrier()


def steps_without_a_cycle(case: ResumeCase, name: str) -> list[int]:
    """The steps of a run that goes on where process 1 has lost its generation cycle, and process 0 has not."""
    checkpoint = Path(case.folder) / "output" / name
    copy_together(Path(case.folder), name)
    (checkpoint / "generation_cycle_1.pt").unlink()
    trainer = build(case, save_steps=100)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return [log["step"] for log in trainer.state.log_history if "reward" in log]


KINDS = {"exactly": exactly, "without an engine": without_an_engine, "without shared storage": without_shared_storage}


def main(config: str, path: str) -> None:
    case = ResumeCase(**json.loads(Path(path).read_text()))
    suit_cpus()
    write_result(Path(case.folder), KINDS[case.kind](config, case))


if __name__ == "__main__":
    main(*sys.argv[1:])
