"""Runs in every process of a launch: trains one case, checks what it ran under, and writes what came out.

`accelerate launch --config_file … -m tests.distributed.worker zero3_cpu case.json`

`result.json` appears when all processes have finished and every check has passed: it alone shows that the run is good.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, gather_object
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sorl_trl.rollout import LockStepEngine, SlotEngine
from tests.distributed.cases import ENGINES, Case, build_trainer, record_turns

POLLS = [0]
"""How often this process has polled its engine."""


def count_polls() -> None:
    for engine in (SlotEngine, LockStepEngine):
        engine.poll = _counted(engine.poll)


def _counted(poll: Any) -> Any:
    def counting(self: Any) -> Any:
        POLLS[0] += 1
        return poll(self)

    return counting


def shard_on_cpu() -> None:
    """Where `accelerate launch` asks for FSDP, have accelerate, which sees no accelerator, use it on CPUs."""
    if os.environ.get("ACCELERATE_USE_FSDP") != "true":
        return
    begin = AcceleratorState.__init__

    def begin_sharded(self: Any, *given: Any, fsdp_plugin: Any = None, **named: Any) -> None:
        begin(self, *given, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is not None:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = begin_sharded  # type: ignore[method-assign]


def suit_cpus() -> None:
    """Have FSDP shard here, and keep DeepSpeed from compiling shared-memory collectives, which takes a minute and a
    C++ compiler.
    """
    shard_on_cpu()
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def engine_facts(trainer: Any) -> dict[str, Any]:
    """What the training really ran under: a wrong configuration falls back to less, silently."""
    engine = trainer.model_wrapped
    stage = engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else 0
    parameters = list(getattr(engine, "module", engine).parameters())
    if stage == 3:  # between two uses a partitioned parameter is empty, and its share lies elsewhere
        is_partitioned = all(p.numel() == 0 < p.ds_tensor.numel() <= (p.ds_numel + 1) // 2 for p in parameters)
    else:
        is_partitioned = all(isinstance(p, DTensor) for p in parameters)
    return {
        "processes": trainer.accelerator.num_processes,
        "machines": trainer.args.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "engine": "FSDP2" if isinstance(engine, FSDPModule) else type(engine).__name__,
        "zero_stage": stage,
        "partitioned": is_partitioned,
    }


def checked_facts(trainer: Any, config: str) -> dict[str, Any]:
    """What the training ran under. Raises AssertionError if it differs from `config`."""
    facts, expected = engine_facts(trainer), ENGINES[config]
    assert {name: facts[name] for name in expected} == expected, f"ran under {facts}, not {expected}"
    return facts


def check(case: Case, facts: dict[str, Any]) -> None:
    """Raise AssertionError unless ranks differed where the case is about that."""
    first, second = facts["turns"]
    assert first != second, f"both ranks needed {first} turns: nothing uneven was tested"
    if case.rollout != "fixed":
        calls = facts["polls"]
        gathers = facts["engine"] != "FSDP2" and case.options.get("ds3_gather_for_generation", True)
        assert (len(set(calls)) == 1) != gathers, f"the ranks polled {calls} times"


def train(case: Case, config: str) -> dict[str, Any]:
    try:
        trainer = build_trainer(case)
    except ValueError as error:
        return {"refused": str(error)}
    turns = record_turns(trainer)
    trainer.train()
    facts = {
        **checked_facts(trainer, config),
        "turns": gather_object([turns]),
        "polls": gather_object([POLLS[0]]),
    }
    check(case, facts)
    if facts["engine"] == "DistributedDataParallel":
        flat = torch.cat([value.detach().flatten() for value in trainer.model.parameters()])
        ranks = trainer.accelerator.gather(flat[None])
        facts["spread"] = (ranks - ranks[0]).abs().max().item()
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.accelerator.is_main_process:
        torch.save(weights, Path(case.folder) / "weights.pt")
    return {**facts, "logs": trainer.state.log_history}


def main(config: str, path: str) -> None:
    case = Case(**json.loads(Path(path).read_text()))
    suit_cpus()
    count_polls()
    write_result(Path(case.folder), train(case, config))


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """`result.json`, once all processes are here; then leave them."""
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        written = folder / "result.part"
        written.write_text(json.dumps(result))
        written.replace(folder / "result.json")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
