"""The policy's loss as docs/internals/equations.md has it, as loops in float64, and batches some way off the policy.

In float64 no comparison of a ratio with the edge of a clip range hangs on rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sorl_trl import SOGRPOTrainer
from sorl_trl.methods import (
    CISPO,
    SAPO,
    VESPO,
    ClipPenalty,
    Method,
    constant_mean,
    micro_batch_mean,
    token_mean,
    trajectory_mean,
    turn_mean,
)
from sorl_trl.trainers.batch import GENERATED_AT
from tests.policies import build_policy
from tests.training import settings
from tests.trajectories import FixedRollout, parity_reward, prompts


def build(folder: Path, tokenizer: Any, method: Any = None, trainer_class: Any = SOGRPOTrainer, **fields: Any) -> Any:
    """A trainer of a policy in float64 whose generation batch of 8 trajectories is one micro-batch.

    Without a method, fields describe all of it.
    """
    arguments = settings(folder, per_device_train_batch_size=8, gradient_accumulation_steps=1)
    if isinstance(method, Method):
        del arguments["epsilon"]
    arguments |= {"steps_per_generation": 1, "gradient_checkpointing": False, **fields}
    rollout = arguments.pop("rollout_func", None) or FixedRollout()
    build_policy().double().save_pretrained(folder / "policy")  # TRL loads the reference from a path
    arguments["model_init_kwargs"] = {"dtype": "auto"}
    trainer = trainer_class(
        str(folder / "policy"),
        arguments.pop("reward_funcs", parity_reward),
        trainer_class.config_class(**arguments),
        prompts(),
        processing_class=tokenizer,
        rollout_func=rollout,
        method={"terms": ()} if method is None else method,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def off_policy_batch(folder: Path, tokenizer: Any, method: Any = None, **fields: Any) -> tuple[Any, dict[str, Any]]:
    """A trainer, and a batch of 8 trajectories whose old and reference log-probabilities lie some way off."""
    trainer = build(folder, tokenizer, method, **{"num_iterations": 2, **fields})
    batch = trainer._generate_and_score_completions([dict(row) for row in prompts(2) for _ in range(4)])
    batch[GENERATED_AT] = torch.tensor(-1)  # as if an update had been made since
    batch["advantages"] = batch["advantages"].double()
    generator = torch.Generator().manual_seed(7)
    for key in ("old_per_token_logps", "ref_per_token_logps"):
        if key in batch:
            noise = torch.randn(batch[key].shape, generator=generator, dtype=torch.float64)
            batch[key] = batch[key] + 0.6 * noise
    return trainer, batch


def token_logps(trainer: Any, batch: dict[str, Any]) -> torch.Tensor:
    """(B, T) log-probabilities of the policy's tokens, by passes of the test's own: one for each context."""
    logps = torch.zeros_like(batch["completion_ids"], dtype=torch.float64)
    for row, position, ids, output in read_apart(trainer.model, batch):
        scores = output.logits[0, :-1].double().log_softmax(-1)
        logps = logps.index_put((torch.tensor(row), position), scores.gather(1, ids[1:, None])[-len(position) :, 0])
    return logps


def read_apart(model: Any, batch: dict[str, Any]) -> Iterator[tuple[int, Any, Any, Any]]:
    """For each context: its row, the positions of its tokens but for the first one's, all its tokens, and output."""
    contexts = batch.get("context_ids", torch.zeros_like(batch["completion_ids"])).abs()
    for row in range(len(contexts)):
        kept = batch["completion_mask"][row].bool()
        for context in contexts[row][kept].unique().tolist():
            position = torch.nonzero(kept & (contexts[row] == context)).flatten()
            ids = batch["completion_ids"][row, position]
            if context == 0:
                ids = torch.cat([batch["prompt_ids"][row][batch["prompt_mask"][row].bool()], ids])
            output = model(input_ids=ids[None], output_hidden_states=True)
            yield row, position if context == 0 else position[1:], ids, output


def gradient(loss: torch.Tensor, trainer: Any) -> torch.Tensor:
    """Of all parameters, in one row."""
    parameters = list(trainer.model.parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
    return torch.cat([part.flatten() for part in parts]).double()


def assert_same_loss(trainer: Any, ours: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal in value and gradient, and the gradient is there."""
    assert abs(ours.item() - expected.item()) < 1e-6
    of_expected = gradient(expected, trainer)
    assert of_expected.abs().max() > 1e-4, "nothing is learnt: a weak test"
    torch.testing.assert_close(gradient(ours, trainer), of_expected, rtol=0, atol=1e-6)


def positions(turn_ids: Tensor) -> list[list[int]]:
    """The positions of each turn of a trajectory."""
    return [torch.nonzero(turn_ids == k).flatten().tolist() for k in range(int(turn_ids.max()) + 1)]


def unit_of(t: int, turn_ids: Tensor, level: str) -> list[int]:
    turns = positions(turn_ids)
    return {"token": [t], "turn": turns[int(turn_ids[t])], "sequence": [*chain(*turns)]}[level]


def unit_ratio(method: Method, log_ratio: Tensor, t: int, unit: list[int], own: bool) -> Tensor:
    """The ratio of a token's unit, with its gradient or, where tokens differ in their advantages, the token's own."""
    logs, arithmetic = log_ratio[unit], (method.ratio.average, method.ratio.level) == ("arithmetic", "turn")
    if not own:
        return logs.exp().mean() if arithmetic else logs.mean().exp()
    if arithmetic:
        return logs.exp().mean().detach() + log_ratio[t].exp() - log_ratio[t].exp().detach()
    return (logs.mean().detach() + log_ratio[t] - log_ratio[t].detach()).exp()


def token_objective(
    method: Method, logps: Tensor, log_ratio: Tensor, t: int, turn_ids: Tensor, advantages: Tensor
) -> Tensor:
    """What is maximised for one token; `advantages` (T,), or (1,) if all tokens share one."""
    kind: Any = method.surrogate
    unit = unit_of(t, turn_ids, method.ratio.level)
    ratio = unit_ratio(method, log_ratio, t, unit, own=len(advantages) > 1)
    advantage = advantages.expand_as(logps)[t].item()
    if isinstance(kind, CISPO):
        return ratio.detach().clamp(max=kind.cap) * advantage * logps[t]
    if isinstance(kind, SAPO):
        temperature = kind.temperature_pos if advantage > 0 else kind.temperature_neg
        return 4 / temperature * torch.sigmoid(temperature * (ratio - 1)) * advantage
    if isinstance(kind, VESPO):
        power, decay = (kind.k_pos, kind.lambda_pos) if advantage >= 0 else (kind.k_neg, kind.lambda_neg)
        of_sequence = log_ratio[turn_ids >= 0].detach().sum().exp()
        return math.exp(decay) * of_sequence**power * (-decay * of_sequence).exp() * advantage * logps[t]
    shrink = len(unit) ** 0.75 if method.clip.by_length and method.ratio.level == "turn" else 1.0
    low, high = method.clip.low / shrink, (method.clip.high or method.clip.low) / shrink
    bounded = ratio if method.clip.delta is None else ratio.clamp(max=1 + (method.clip.delta - 1) / shrink)
    return torch.min(bounded * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def reference_loss(trainer: Any, batch: dict[str, Any]) -> Tensor:
    """The loss without terms."""
    args, method, logps = trainer.args, trainer.method, token_logps(trainer, batch)
    log_ratio = logps - batch["old_per_token_logps"]
    advantages = batch["advantages"].double().reshape(len(logps), -1)
    weights = batch.get("importance_sampling_ratio", torch.ones(1)).expand_as(logps)
    losses: list[list[Tensor]] = []
    for i, turn_ids in enumerate(batch["turn_ids"]):
        losses.append([])
        for turn in positions(turn_ids):
            of_turn = []
            for t in turn:
                loss = -weights[i, t] * token_objective(method, logps[i], log_ratio[i], t, turn_ids, advantages[i])
                if args.beta:
                    difference = batch["ref_per_token_logps"][i, t] - logps[i, t]
                    kl = difference.exp() - difference - 1
                    of_unit = log_ratio[i, unit_of(t, turn_ids, method.ratio.level)].mean().exp()
                    loss = loss + args.beta * kl * (of_unit if args.use_bias_correction_kl else 1)
                of_turn.append(loss)
            losses[-1].append(torch.stack(of_turn))
    return averaged(method.mean, losses, args.max_completion_length)


def averaged(mean: Any, x: list[list[Tensor]], longest: int = 1) -> Tensor:
    """The mean of one value per token, `x[trajectory][turn]`; a trajectory without any counts as 0."""
    rows = [torch.cat([*turns, torch.zeros(0, dtype=torch.float64)]) for turns in x]
    if mean in (token_mean, micro_batch_mean):
        return torch.cat(rows).mean()
    if mean is turn_mean:
        of_rows = [torch.stack([turn.mean() for turn in turns]).mean() if turns else torch.zeros(()) for turns in x]
    else:
        of_rows = [row.sum() / (max(len(row), 1) if mean is trajectory_mean else 1) for row in rows]
    return torch.stack(of_rows).mean() / (longest if mean is constant_mean else 1)


def reference_penalty(trainer: Any, batch: dict[str, Any], piece: ClipPenalty) -> Tensor:
    log_ratio = token_logps(trainer, batch) - batch["old_per_token_logps"]
    epsilon = trainer.method.clip.low if piece.epsilon is None else piece.epsilon
    total = torch.zeros((), dtype=torch.float64)
    for i, turn_ids in enumerate(batch["turn_ids"]):
        turns = positions(turn_ids)
        if not turns:
            continue
        logs = log_ratio[i, [*chain(*turns)]]
        gate = float(((logs.detach().exp() - 1).abs() > epsilon).double().mean())
        total = total + gate * (logs.exp() * logs - logs.exp() + 1).mean()
    return piece.coef * total / len(log_ratio)
