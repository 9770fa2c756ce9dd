"""Connects a trainer to its rollouts ahead: during a run, in its checkpoints, and in its batches."""

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
from sorl_trl.rollout import TurnEnd
from sorl_trl.trainers.ahead.policies import PolicyCopies
from sorl_trl.trainers.ahead.rollouts import RolloutsAhead
from sorl_trl.trainers.cycle.resume_point import ranks_where
from sorl_trl.trainers.turns.batch import policy_pass


@contextmanager
def sampling_ahead(trainer: Any, staleness: int, by_completion: bool = False) -> Iterator[None]:
    """Within it, a run's batches are sampled ahead. Evaluation samples as usual, from one version of the weights."""
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


def sample_from_a_copy(trainer: Any) -> None:
    """Let the trainer's rollouts sample from a copy of the policy, if those ahead of training do: for a rehearsal."""
    if not trainer.args.async_staleness or trainer.use_vllm:
        return
    rollout = trainer.rollout_func.__wrapped__
    end = TurnEnd(trainer._tokenizer, rollout.protocol.stop_strings, trainer.eos_token_ids)
    trainer.engine_ahead = PolicyCopies(trainer).engine(end, rollout.engine)


def load_ahead(trainer: Any, state: dict[str, Any] | None) -> bool:
    """Restore the state of rollouts ahead from a checkpoint. All processes call it together.

    Returns whether any process has trained on rollouts out of order.

    Raises UserMistake if one has, and this run orders or bounds rollouts differently.
    """
    if state is None:
        return False
    ahead: RolloutsAhead | None = getattr(trainer, "_ahead", None)
    now = {} if ahead is None else ahead.state()
    is_same = all(now.get(key) == state[key] for key in ("parts_of_batch", "grace"))
    is_out_of_turn = bool(ranks_where(bool(state["late"] or state["early"])))
    if not is_same and is_out_of_turn:
        raise UserMistake(
            "The checkpoint's run trained on rollouts in the order of completion: resume with the same `async_order`, "
            "`async_staleness` and batch settings, or start a new run."
        )
    if ahead is not None:
        ahead.load(state)
    return is_out_of_turn


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
        output["old_per_token_logps"] = policy_pass(trainer, output).logps
    if is_behaviour:
        output["old_per_token_logps"] = torch.where(
            sampling.isnan(), output.get("old_per_token_logps", sampling), sampling
        )
