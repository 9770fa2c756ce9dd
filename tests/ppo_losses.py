"""The critic's loss as docs/internals/equations.md has it, as loops in float64; `losses.py` has the policy's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_trl import SOPPOTrainer
from tests.critics import BATCH_SIZE, build_ppo, set_head
from tests.losses import averaged, gradient, positions, read_apart, reference_loss, reference_penalty
from tests.trajectories import parity_reward, turn_reward

DISCOUNTED = {"gamma": 0.9, "gae_lambda": 0.8}


def build(tmp_path: Path, tokenizer: Any, **overrides: Any) -> SOPPOTrainer:
    """One micro-batch per rollout, and a critic that reads the policy's hidden states."""
    one_batch = {"per_device_train_batch_size": BATCH_SIZE, "gradient_accumulation_steps": 1}
    defaults = {"critic": "head", "steps_per_generation": 1}
    trainer = build_ppo(
        tmp_path, tokenizer, **{**one_batch, **defaults, "reward_funcs": [turn_reward, parity_reward], **overrides}
    )
    set_head(trainer)
    return trainer


LEVELS: dict[str, dict[str, Any]] = {
    "turn": {"advantage_level": "turn"},
    "token": {"advantage_level": "token"},
}
"""Time steps of critic and GAE."""


def units_of(span: list[int], args: Any) -> list[list[int]]:
    """The tokens of each time step of a turn."""
    return [span] if args.advantage_level == "turn" else [[token] for token in span]


def state_values(trainer: SOPPOTrainer, batch: dict[str, Any]) -> Tensor:
    """(B, T) V of the state before each token: the head on the policy's last hidden states in the token's context."""
    values = torch.zeros_like(batch["completion_ids"], dtype=torch.float64)
    for row, position, _, output in read_apart(trainer.model, batch):
        states = output.hidden_states[-1][0, -len(position) - 1 : -1].double().detach()
        scale = states.size(-1) ** 0.5 * states.norm(dim=-1)
        found = (states @ trainer.critic.head.weight.double().T).squeeze(-1) / scale
        values = values.index_put((torch.tensor(row), position), found + trainer.critic.head.bias.double())
    return values


def value_reference(trainer: SOPPOTrainer, batch: dict[str, Any]) -> Tensor:
    """½ max((v − R)², (clip(v, v_old ± c) − R)²) where values are read."""
    args, values = trainer.args, state_values(trainer, batch)
    losses: list[list[Tensor]] = []
    for i, turn_ids in enumerate(batch["turn_ids"]):
        losses.append([])
        for span in positions(turn_ids):
            loss = []
            for t in (unit[0] for unit in units_of(span, args)):
                v, old, target = values[i, t], batch["old_values"][i, t].double(), batch["returns"][i, t].double()
                error = (v - target) ** 2
                if args.value_clip_range is not None:
                    clipped = v.clamp(old - args.value_clip_range, old + args.value_clip_range)
                    error = torch.max(error, (clipped - target) ** 2)
                loss.append(0.5 * error)
            losses[i].append(torch.stack(loss))
    return averaged(trainer.method.mean, losses)


def assert_follows_the_formula(trainer: SOPPOTrainer, batch: dict[str, Any]) -> None:
    ours = trainer._compute_loss(trainer.model, batch)
    reference = reference_loss(trainer, batch) + trainer.args.vf_coef * value_reference(trainer, batch)
    for term in trainer.method.terms:
        reference = reference + reference_penalty(trainer, batch, term)
    assert ours.item() == pytest.approx(reference.item(), abs=1e-6)
    torch.testing.assert_close(gradient(ours, trainer), gradient(reference, trainer), rtol=0, atol=2e-6)
