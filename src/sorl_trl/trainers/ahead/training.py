"""The old policy of rollouts ahead: the one that sampled them, or the policy as it begins to train on them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import pad

from sorl_trl.trainers.resume_point import ranks_where
from sorl_trl.trainers.turns.batch import policy_pass


def sampled_logps(trainer: Any, logprobs: list[list[float | None]]) -> Tensor | None:
    """(B, T) the log-probabilities with which a rollout was sampled, or None if any is unknown.

    They save a pass of the policy. All processes call this together and get the same kind of result.
    """
    rows = [torch.tensor([math.nan if each is None else each for each in row]) for row in logprobs]
    if ranks_where(any(bool(row.isnan().any()) for row in rows)):
        return None
    padded: Tensor = pad(rows, padding_value=0.0, pad_to_multiple_of=trainer.pad_to_multiple_of)
    return padded.to(trainer.accelerator.device)


def set_old_policy(trainer: Any, output: dict[str, Any]) -> None:
    """Store in a batch the log-probabilities of the policy that sampled, or of the current policy.

    Tokens for which vLLM reports none get those of the policy.
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
