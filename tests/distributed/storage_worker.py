"""Runs in every process of a launch: trains where each machine has a folder of its own, and tries to go on from there.

`accelerate launch --config_file … -m tests.distributed.storage_worker ddp_two_machines_cpu case_0.json`
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from tests.distributed.cases import ENGINES
from tests.distributed.resume_worker import build, continued, weights_of
from tests.distributed.worker import engine_facts, suit_cpus, write_result


class Messages(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def refusals(attempt: Any) -> list[str]:
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


def steps_without_a_cycle(case: dict[str, Any], checkpoint: str) -> list[int]:
    """The steps of a run that goes on where process 1 has lost its generation cycle, and process 0 has not."""
    folder = Path(case["folder"])
    copy_together(folder, checkpoint)
    (folder / "output" / checkpoint / "generation_cycle_1.pt").unlink()
    trainer = build(folder, case["trainer"], save_steps=100, target_kl=case["target_kl"])
    trainer.train(resume_from_checkpoint=str(folder / "output" / checkpoint))
    return [log["step"] for log in trainer.state.log_history if "reward" in log]


def main(config: str, path: str) -> None:
    case = json.loads(Path(path).read_text())
    folder, messages = Path(case["folder"]), Messages()
    logging.getLogger("sorl_trl.trainers").addHandler(messages)
    suit_cpus()
    trainer = build(folder, case["trainer"], target_kl=case["target_kl"])
    trainer.train()
    facts = engine_facts(trainer)
    assert {name: facts[name] for name in ENGINES[config]} == ENGINES[config], f"ran under {facts}"
    checkpoint = folder / "output" / "checkpoint-1"
    result = {
        "logs": trainer.state.log_history,
        "in_pieces": refusals(lambda: trainer.train(resume_from_checkpoint=str(checkpoint))),
    }
    weights = weights_of(trainer)
    copy_together(folder, "checkpoint-1")
    result["resumed"] = continued(case, 1, weights)
    result["collects"] = steps_without_a_cycle(case, "checkpoint-3")
    write_result(folder, {**result, "warning": "\n".join(messages.texts)})


if __name__ == "__main__":
    main(*sys.argv[1:])
