"""Runs in every process of a launch: the engine of one process is gone, and the run goes on from what it left.

`accelerate launch --config_file … -m tests.distributed.gone_worker ddp_cpu case.json`
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback

from sorl_trl.agents.vllm import EngineUnavailable
from sorl_trl.search import BM25Index
from sorl_trl.trainers.ahead.policies import PolicyCopies
from tests.agents import build_agent
from tests.distributed.cases import ENGINES
from tests.distributed.worker import engine_facts, suit_cpus, write_result


class Straggling:
    """A search engine whose every fourth call takes longer than a few optimizer steps."""

    def __init__(self, search: BM25Index) -> None:
        self.search, self.calls = search, count()

    def search_batch(self, queries: Sequence[str], k: int) -> Any:
        if next(self.calls) % 4 == 0:
            time.sleep(0.5)
        return self.search.search_batch(queries, k)


def build(folder: Path, asked: list[Any], order: str, save: str = "steps") -> Any:
    """A rollout for each optimizer step, one ahead; `asked` gets the prompts of each that is trained on."""
    fields: dict[str, Any] = {"per_device_train_batch_size": 4, "num_generations": 2, "steps_per_generation": 1}
    fields |= {"num_iterations": 1, "gradient_accumulation_steps": 1, "max_steps": 6, "async_staleness": 1}
    fields |= {"save_strategy": save, "save_steps": 100, "async_order": order}
    trainer = build_agent(folder / order, Straggling(BM25Index.load(folder / "index")), **fields)
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


def run(config: str, folder: Path, order: str) -> dict[str, Any]:
    engine, whole, asked, said = PolicyCopies.engine, list[Any](), list[Any](), ""
    build(folder, whole, order, save="no").train()
    trainer = build(folder, asked, order)
    trainer.add_callback(Dies())
    try:
        trainer.train()
    except EngineUnavailable as error:
        said = str(error)
    PolicyCopies.engine = engine
    facts = engine_facts(trainer)
    assert {name: facts[name] for name in ENGINES[config]} == ENGINES[config], f"ran under {facts}"
    rest = build(folder, asked, order, save="no")
    rest.train(resume_from_checkpoint="latest")
    return {"said": gather_object([said]), "asked": gather_object([asked]), "whole": gather_object([whole])}


def main(config: str, path: str) -> None:
    folder = Path(json.loads(Path(path).read_text())["folder"])
    suit_cpus()
    write_result(folder, {order: run(config, folder, order) for order in ("dataset", "completed")})


if __name__ == "__main__":
    main(*sys.argv[1:])
