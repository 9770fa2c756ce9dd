"""A batch of contexts, plain passes of a model over each of them, and a trainer's `Forward` without a trainer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from sorl_trl.trainers.forward import Forward
from sorl_trl.trainers.host import Host
from sorl_trl.trainers.layouts import attend_in_segments
from tests import model_families as families
from tests.losses import read_apart

ROWS = [
    # prompt, then (context, tokens, is a turn)
    (5, [(0, 4, 1), (0, 3, 0), (1, 7, 0), (1, 5, 1), (0, 2, 0), (0, 4, 1), (2, 8, 0), (2, 3, 1)]),
    (7, [(0, 9, 1)]),
    (3, [(0, 2, 1), (0, 4, 0), (-1, 3, 0), (1, 6, 0), (1, 6, 1), (1, 2, 0)]),
]
"""Contexts alternate; context 1 of the last row repeats tokens."""
IN_SINGLE = {"rtol": 2e-5, "atol": 2e-5}
"""Norms of Gemma and the head of a critic are float32, and so is TRL's head."""


def rollout() -> dict[str, Tensor]:
    """TRL's batch of `ROWS`, with prompts padded on the left. A context begins like its prompt."""
    generator = torch.Generator().manual_seed(0)
    width, length = max(row for row, _ in ROWS), max(sum(part[1] for part in parts) for _, parts in ROWS) + 2
    batch = {f"prompt_{name}": torch.zeros(len(ROWS), width, dtype=torch.long) for name in ("ids", "mask")}
    names = ("completion_ids", "completion_mask", "tool_mask", "context_ids")
    batch |= {name: torch.zeros(len(ROWS), length, dtype=torch.long) for name in names}
    for row, (size, parts) in enumerate(ROWS):
        prompt = torch.randint(4, families.VOCABULARY, (size,), generator=generator)
        batch["prompt_ids"][row, width - size :], batch["prompt_mask"][row, width - size :] = prompt, 1
        at, begun = 0, {0}
        for context, count, is_turn in parts:
            own = slice(at, at + count)
            tokens = torch.randint(4, families.VOCABULARY, (count,), generator=generator)
            if abs(context) not in begun:
                tokens[: min(size, count)] = prompt[:count]
            begun.add(abs(context))
            batch["completion_ids"][row, own], batch["completion_mask"][row, own] = tokens, 1
            batch["tool_mask"][row, own], batch["context_ids"][row, own] = is_turn, context
            at += count
    return batch


BATCH = rollout()
SCORED = BATCH["tool_mask"].bool()
LENGTH = SCORED.size(1)


def one_by_one(model: Any, value_of: Callable[[Tensor], Tensor] | None = None) -> dict[str, Tensor]:
    """The results of plain passes for each token: `value_of` gives (1, L) values for (1, L) ids."""
    found = {name: torch.zeros(SCORED.shape, dtype=torch.float64) for name in ("logps", "entropies", "values")}
    for row, position, ids, output in read_apart(model, BATCH):
        logps = output.logits[0, :-1].double().log_softmax(-1)
        of_text = {"logps": logps.gather(1, ids[1:, None])[:, 0], "entropies": -(logps.exp() * logps).sum(-1)}
        if value_of is not None:
            of_text["values"] = value_of(ids[None])[0, :-1].double()
        at = torch.tensor(row), position
        found |= {name: found[name].index_put(at, each[-len(position) :]) for name, each in of_text.items()}
    return {name: torch.where(SCORED, each, 0.0) for name, each in found.items()}


def whole(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The ids of prompts and completions, and their mask."""
    ids, mask = (torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], 1) for name in ("ids", "mask"))
    return ids, mask


def detached(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.detach() for name, each in found.items()}


def with_head(model: Any, packs: bool = True) -> Any:
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if packs:
        attend_in_segments(model)
    return model


def forward_of(model: Any, **args: Any) -> Forward:
    given = {
        "n_gpu": 1,
        "bf16": False,
        "fp16": False,
        "tf32": None,
        "process_index": 0,
        "router_replay": "none",
    } | args
    parts = {"model": model, "ref_model": None, "accelerator": Accelerator(cpu=True), "is_fsdp_enabled": False}
    trainer = SimpleNamespace(args=SimpleNamespace(**given), **parts)
    trainer._get_per_token_logps_and_entropies = partial(GRPOTrainer._get_per_token_logps_and_entropies, trainer)
    return Forward(Host(trainer))


def asked(forward: Forward, model: Any, batch: dict[str, Tensor] = BATCH, **options: Any) -> dict[str, Tensor]:
    found = forward(model, batch, entropies=True, **options)
    assert found.entropies is not None
    return {"logps": found.logps.double(), "entropies": found.entropies.double()}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name.startswith("sorl_trl")]
