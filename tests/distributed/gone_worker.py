"""Runs in every process of a launch: the engine of one process is gone, and the run goes on from what it left.

`accelerate launch --config_file … -m tests.distributed.gone_worker ddp_cpu case.json`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback

from sorl_trl.search import BM25Index
from sorl_trl.trainers.agents.vllm import EngineUnavailable
from sorl_trl.trainers.ahead.policies import PolicyCopies
from tests.agents import build_agent
from tests.distributed.cases import ENGINES
from tests.distributed.worker import engine_facts, skip_compilation, write_result


def build(folder: Path, asked: list[Any], save: str = "steps") -> Any:
    """A rollout for each optimizer step, one ahead; `asked` gets the prompts of each that is trained on."""
    fields: dict[str, Any] = {"per_device_train_batch_size": 4, "num_generations": 2, "steps_per_generation": 1}
    fields |= {"num_iterations": 1, "gradient_accumulation_steps": 1, "max_steps": 6, "async_staleness": 1}
    fields |= {"save_strategy": save, "save_steps": 100}
    trainer = build_agent(folder / "output", BM25Index.load(folder / "index"), **fields)
    generate = trainer._generate

    def noted(prompts: list[Any]) -> Any:
        asked.append(list(prompts))
        return generate(prompts)

    trainer._generate = noted
    return trainer


class Dies(TrainerCallback):  # type: ignore[misc]
    """The engine of the second process is gone after the third step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3 and args.process_index == 1:
            PolicyCopies.engine = refuse


def refuse(*args: Any) -> Any:
    raise EngineUnavailable("connection refused")


def main(config: str, path: str) -> None:
    folder = Path(json.loads(Path(path).read_text())["folder"])
    skip_compilation()
    engine, whole, asked, said = PolicyCopies.engine, list[Any](), list[Any](), ""
    build(folder, whole, save="no").train()
    trainer = build(folder, asked)
    trainer.add_callback(Dies())
    try:
        trainer.train()
    except EngineUnavailable as error:
        said = str(error)
    PolicyCopies.engine = engine
    facts = engine_facts(trainer)
    assert {name: facts[name] for name in ENGINES[config]} == ENGINES[config], f"ran under {facts}"
    rest = build(folder, asked, save="no")
    rest.train(resume_from_checkpoint="latest")
    result = {"said": gather_object([said]), "asked": gather_object([asked]), "whole": gather_object([whole])}
    write_result(folder, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
