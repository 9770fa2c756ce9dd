"""Runs in every process of a launch: `accelerate launch --config_file … -m tests.vllm.worker ddp_cpu case.json`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from sorl_trl.search import BM25Index
from sorl_trl.trainers.agents.vllm import VLLMGenerator
from tests.vllm import shims
from tests.vllm.policies import GAP, load_policy, logged, vllm_agent

CALLS: list[int] = []
SAMPLED: list[tuple[int, ...]] = []


def main() -> None:
    case = json.loads(Path(sys.argv[2]).read_text())
    folder = Path(case["folder"])
    shims.install()
    generate = VLLMGenerator.generate

    def noting(self: Any, contexts: Any, limits: Any) -> Any:
        generations = generate(self, contexts, limits)
        CALLS.append(len(contexts))
        SAMPLED.extend(generation.token_ids for generation in generations)
        return generations

    VLLMGenerator.generate = noting  # type: ignore[method-assign]
    trainer = vllm_agent(folder, search=BM25Index.load(folder / "index"), **case["options"])
    trainer.train()
    before = load_policy(folder / "policy").state_dict()
    trained = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    flat = torch.cat([value.flatten() for value in trained.values()])
    ranks = trainer.accelerator.gather(flat[None])
    result = {
        "engine": type(trainer.model_wrapped).__name__,
        "gaps": logged(trainer, GAP),
        "moved": max((before[name] - value).abs().max().item() for name, value in trained.items()),
        "spread": (ranks - ranks[0]).abs().max().item(),
        "calls": gather_object([len(CALLS)]),
        "sampled": gather_object([SAMPLED]),
    }
    if trainer.accelerator.is_main_process:
        (folder / "result.json").write_text(json.dumps(result))
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    os.environ.update(shims.ENVIRONMENT)
    main()
