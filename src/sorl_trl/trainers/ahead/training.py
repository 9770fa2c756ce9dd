"""How a trainer has its rollouts sampled ahead: for the length of a run, in its checkpoints, and in its batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import pad

from sorl_trl.command_line import UserMistake
from sorl_trl.trainers.ahead.rollouts import RolloutsAhead
from sorl_trl.trainers.cycle.resume_point import ranks_where
from sorl_trl.trainers.turns.batch import policy_pass


@contextmanager
def sampling_ahead(trainer: Any, staleness: int, by_completion: bool = False) -> Iterator[None]:
    """In a run, its batches are sampled ahead. Evaluation samples as ever, from one version of the weights."""
    at_once = trainer.rollout_func
    trainer._ahead = ahead = RolloutsAhead(trainer, at_once.__wrapped__, staleness, by_completion)

    @wraps(at_once)
    def taken(prompts: Any, of: Any) -> dict[str, Any]:
        return ahead.output if trainer.model.training else at_once(prompts, of)

    trainer.rollout_func = taken
    try:
        yield
    finally:
        trainer.rollout_func, trainer._ahead = at_once, None
        ahead.close()


def load_ahead(trainer: Any, state: dict[str, Any] | None) -> bool:
    """Have a resumed run take up what its checkpoint says of rollouts ahead. All processes call it together.

    Returns whether any process has trained on rollouts out of turn.

    Raises UserMistake where one has, and this run orders or bounds them otherwise.
    """
    if state is None:
        return False
    ahead: RolloutsAhead | None = getattr(trainer, "_ahead", None)
    now = {} if ahead is None else ahead.state()
    is_same = all(now.get(key) == state[key] for key in ("parts_of_batch", "grace"))
    is_out_of_turn = bool(ranks_where(bool(state["late"] or state["early"])))
    if not is_same and is_out_of_turn:
        raise UserMistake(
            "The checkpoint was written where rollouts were trained on in the order of completion: resume with the "
            "same `async_order`, `async_staleness` and batch settings, or start a new run."
        )
    if ahead is not None:
        ahead.load(state)
    return is_out_of_turn


def sampled_logps(trainer: Any, logprobs: list[list[float | None]]) -> Tensor | None:
    """(B, T) what a rollout was sampled with, so that no pass of the policy need find out; None where some is unknown.

    All processes call it together, and find the same.
    """
    rows = [torch.tensor([math.nan if each is None else each for each in row]) for row in logprobs]
    if ranks_where(any(bool(row.isnan().any()) for row in rows)):
        return None
    padded: Tensor = pad(rows, padding_value=0.0, pad_to_multiple_of=trainer.pad_to_multiple_of)
    return padded.to(trainer.accelerator.device)


def set_old_policy(trainer: Any, output: dict[str, Any]) -> None:
    """Put into a batch the log-probabilities of what sampled, or of the policy as it is now.

    Tokens that vLLM says none of get those of the policy.
    """
    is_behaviour = trainer.args.compares_with_sampler
    sampling = output["sampling_per_token_logps"]
    is_needed = not is_behaviour or bool(ranks_where(bool(sampling.isnan().any())))
    if "old_per_token_logps" not in output and is_needed:
        output["old_per_token_logps"] = policy_pass(trainer, output)
    if is_behaviour:
        output["old_per_token_logps"] = torch.where(
            sampling.isnan(), output.get("old_per_token_logps", sampling), sampling
        )
