"""Connects a trainer to its rollouts ahead: during a run, in its checkpoints, and in its batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from sorl_trl.command_line import UserMistake
from sorl_trl.rollout import TurnEnd
from sorl_trl.trainers.ahead.policies import PolicyCopies
from sorl_trl.trainers.ahead.rollouts import RolloutsAhead
from sorl_trl.trainers.cycle.resume_point import ranks_where


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
