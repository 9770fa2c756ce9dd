"""The correction of vLLM's log-probabilities turn by turn, in a batch that TRL has corrected in its own way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sorl_trl.ops import TurnLayout, is_vetoed, turn_broadcast, turn_layout, turn_mismatch, within
from sorl_trl.trainers.base_config import MINIRL_LOSS_TYPE
from sorl_trl.trainers.loss.mismatch import mismatch_log_ratio
from sorl_trl.trainers.loss.turn_metrics import MetricSums
from sorl_trl.trainers.options.loss import TURN_MODES
from sorl_trl.trainers.turns.dropping import drop

_RATIO = "sampling/importance_sampling_ratio/"


def corrects_by_turn(args: Any) -> bool:
    """Whether the correction is one per turn; MiniRL's weights have their own, of each token."""
    return args.vllm_importance_sampling_mode in TURN_MODES and args.loss_type != MINIRL_LOSS_TYPE


def correct_mismatch(trainer: Any, output: dict[str, Any]) -> None:
    """Replace TRL's ratio by one per turn, and drop turns and trajectories, as the options say. All ranks together.

    Args:
        trainer: a `GRPOTrainer` with vLLM's correction, which its TRL part has made by token.
        output: what `_generate_and_score_completions` makes, with advantages that are final.
    """
    args, turns = trainer.args, turn_layout(output["turn_ids"])
    log_ratio, sums = mismatch_log_ratio(output), MetricSums()
    kept = torch.ones_like(turns.loss_mask)
    vetoed = torch.zeros_like(turns.counts, dtype=torch.bool)
    if args.mismatch_veto is not None:
        vetoed = is_vetoed(log_ratio, turns, args.mismatch_veto)
        kept &= ~vetoed.unsqueeze(1)
        sums.add_mean("mismatch/vetoed_trajectories", vetoed.float(), turns.counts > 0)
    if corrects_by_turn(args):
        keeps_turn, weights = _by_turn(trainer, turn_mismatch(log_ratio, turns), turns, vetoed, sums)
        kept &= turn_broadcast(keeps_turn.long(), turns).bool()
        on_tokens = turn_broadcast(weights, turns).to(log_ratio.dtype)
        output["importance_sampling_ratio"] = torch.where(kept & turns.loss_mask, on_tokens, 1.0)
    _log(trainer, sums)
    drop(output, kept, trainer.accelerator)


def _by_turn(
    trainer: Any, ratio: Tensor, turns: TurnLayout, vetoed: Tensor, sums: MetricSums
) -> tuple[Tensor, Tensor]:
    """(B, K) which turns the mode keeps, and by what they weigh; what it did goes into `sums`."""
    bounds = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
    inside = within(ratio, *bounds)
    present = turns.turn_mask & ~vetoed.unsqueeze(1)
    if trainer.args.vllm_importance_sampling_mode == "turn_mask":
        kept, weights = inside, ratio
        sums.add_mean("mismatch/dropped_turns", (~inside).float(), present)
    else:
        kept = torch.ones_like(inside)
        weights = ratio.clamp(*bounds)
        sums.add_mean("mismatch/cut_weights", (~inside).float(), present)
    sums.add_min(f"{_RATIO}min", weights, kept & present)
    sums.add_mean(f"{_RATIO}mean", weights, kept & present)
    sums.add_max(f"{_RATIO}max", weights, kept & present)
    return kept, weights


def _log(trainer: Any, sums: MetricSums) -> None:
    """Log what was done, in the place of what TRL has logged under the same name, once for each rollout it scored."""
    is_training = trainer.model.training
    logged = trainer._metrics["train" if is_training else "eval"]
    rollouts = 1 + trainer._refill.rounds if is_training else 1
    for name, value in sums.reduce(trainer.accelerator).items():
        if name.startswith(_RATIO):
            del logged[name][-rollouts:]
        logged[name].append(value)
