"""Runs in every process of a launch: `accelerate launch --config_file … -m tests.vllm.worker ddp_cpu case.json`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.tensor import DTensor

from sorl_trl.rollout.engines.vllm import VLLMEngine
from sorl_trl.search import BM25Index
from tests.agents import logged
from tests.distributed.worker import engine_facts, suit_cpus
from tests.vllm import shims
from tests.vllm.policies import GAP, load_policy, vllm_agent

SAMPLED: list[tuple[int, ...]] = []
ENGINES: set[tuple[str, bool]] = set()


def whole(value: Any) -> Tensor:
    """A parameter without FSDP's shards."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def main() -> None:
    case = json.loads(Path(sys.argv[2]).read_text())
    folder = Path(case["folder"])
    before = load_policy(folder / "policy").state_dict()  # later, ZeRO-3 would shard it
    shims.install()
    suit_cpus()
    finish = VLLMEngine._finish

    def noting(self: Any, request: Any, sampled: Any) -> Any:
        SAMPLED.append(sampled.token_ids)
        ENGINES.add((type(self).__name__, self.polls_together))
        return finish(self, request, sampled)

    VLLMEngine._finish = noting  # type: ignore[method-assign]
    trainer = vllm_agent(folder, search=BM25Index.load(folder / "index"), **case["options"])
    trainer.train()
    policy = trainer.accelerator.unwrap_model(trainer.model)
    with trainer._dist.gather_params([*policy.parameters()]):
        trained = {name: whole(value).clone() for name, value in policy.state_dict().items()}
    flat = torch.cat([value.flatten() for value in trained.values()])
    ranks = trainer.accelerator.gather(flat[None])
    result = {
        **engine_facts(trainer),
        "engines": gather_object(sorted(ENGINES)),
        "gaps": logged(trainer, GAP),
        "largest_ratios": logged(trainer, "turns/ratio_max"),
        "moved": max((before[name] - value).abs().max().item() for name, value in trained.items()),
        "spread": (ranks - ranks[0]).abs().max().item(),
        "sampled": gather_object([SAMPLED]),
    }
    if trainer.accelerator.is_main_process:
        (folder / "result.json").write_text(json.dumps(result))
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    os.environ.update(shims.ENVIRONMENT)
    main()
