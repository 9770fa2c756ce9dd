"""The loss of SO-GRPO, which is also the policy's in SO-PPO: its equations, in their order (docs/paper_to_code.md).

    ratio      w_t = exp(log-ratio of the token, its turn or the sequence)          `ops.log_importance_ratio`
    range      ε_k = ε / |y^k|^p, with `clip_range_scaling`                         `ops.scaled_clip_range`
    surrogate  S_t = min(w_t Â_t, clip(w_t, 1 − ε_low, 1 + ε_high) Â_t)             `ops.clipped_surrogate`
               clip(w_t, …) Â_t alone, with `double_sided_clip`                     `ops.double_sided_surrogate`
               M_t sg[min(π_θ/μ, C)] Â_t π_θ/sg[π_θ], with `loss_type="minirl"`     `ops.minirl_surrogate`
    mean       J = mean_i (1/n_i) Σ_k mean_{t∈k} S_t, with `loss_type="turn"`       `ops.turn_weights`
    penalty    P = mean_i f_i · KL_i, with `clip_normalization="kl_penalty"`        `ops.clip_penalty`
    guard      G = (1/N) Σ_i Σ_k F_{i,k}, with `llds_coef`                          `ops.likelihood_falls`
    loss       L = −J + λ P + λ_G G, by default −J

TRL's own loss takes the mean, and adds the reference KL, the entropy and what else its options say; how it is given
the surrogate is in `ratio_substitution`. SO-PPO adds the critic's value loss.
"""

from __future__ import annotations

from torch import Tensor

from sorl_trl.ops import (
    TurnLayout,
    clip_fraction,
    clip_penalty,
    clipped_surrogate,
    double_sided_surrogate,
    gated_kl,
    is_clipped,
    is_outside,
    log_importance_ratio,
    minirl_surrogate,
    turn_clip_fraction,
    turn_weights,
    with_own_gradients,
)
from sorl_trl.trainers.base_config import AGGREGATED_AS, MINIRL_LOSS_TYPE, TURN_LOSS_TYPE, TurnLevelConfig
from sorl_trl.trainers.config_rules import LOSSES_WITHOUT_MIN
from sorl_trl.trainers.loss.micro_batch import ClipRange, MicroBatch, scaled_to_units


def has_own_surrogate(args: TurnLevelConfig, of_tokens: bool) -> bool:
    """Whether `surrogate` takes the place of TRL's, for a batch with advantages `of_tokens` or of trajectories.

    TRL's knows no turns, no range that depends on a length, no advantages that differ within a sequence, and no clip
    on both sides.
    """
    needs_turns = args.ratio_level == "turn" or args.loss_type in AGGREGATED_AS
    is_beyond_trl = args.clip_range_scaling_in_use != "none" or of_tokens
    needs_sequences = args.ratio_level == "sequence" and is_beyond_trl
    needs_own = needs_turns or needs_sequences or args.double_sided_clip
    return args.loss_type not in LOSSES_WITHOUT_MIN and needs_own


def log_ratio_of_units(log_ratio: Tensor, turns: TurnLayout, advantages: Tensor, args: TurnLevelConfig) -> Tensor:
    """(B, T) the log-ratio of the unit that each token belongs to.

    Turns of one sequence may have advantages of their own, which its ratio alone would average: then each token has
    its own gradient (GSPO-token).

    Args:
        log_ratio: (B, T) of tokens.
        turns: the turns of the B trajectories.
        advantages: (B, T), or (B, 1) where all tokens of a trajectory have the same.
        args: `importance_sampling_level` and `turn_ratio` are read.
    """
    of_units = log_importance_ratio(log_ratio, turns, args.ratio_level, args.turn_ratio)
    if args.ratio_level == "sequence" and advantages.size(1) > 1:
        return with_own_gradients(of_units, log_ratio, turns)
    return of_units


def surrogate(
    log_ratio: Tensor,
    turns: TurnLayout,
    advantages: Tensor,
    args: TurnLevelConfig,
    clip_range: ClipRange,
    mismatch: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(B, T) each token's surrogate, and (B, T) the ratio that it is formed of.

    With `loss_type="turn"` the surrogate is weighted so that TRL's mean over the tokens of each trajectory is the mean
    over its turns.

    Args:
        log_ratio: (B, T) of tokens.
        turns: the turns of the B trajectories.
        advantages: (B, T) or (B, 1).
        args: `importance_sampling_level`, `turn_ratio`, `double_sided_clip`, `loss_type` and `minirl_cap` are
            read.
        clip_range: of the ratio.
        mismatch: (B, T) ratios of the old policy to the one that sampled, by which `loss_type="minirl"` weighs tokens.
    """
    ratio = log_ratio_of_units(log_ratio, turns, advantages, args).exp()
    if args.loss_type == MINIRL_LOSS_TYPE:
        stopped = is_stopped(ratio, advantages, args, clip_range)
        weights = ratio if mismatch is None else ratio * mismatch
        of_tokens = minirl_surrogate(log_ratio, weights, advantages, stopped, args.minirl_cap)
    elif args.double_sided_clip:
        of_tokens = double_sided_surrogate(ratio, advantages, clip_range.low, clip_range.high)
    else:
        of_tokens = clipped_surrogate(ratio, advantages, *clip_range)
    return (turn_weights(turns) * of_tokens if args.loss_type == TURN_LOSS_TYPE else of_tokens), ratio


def is_stopped(ratio: Tensor, advantages: Tensor, args: TurnLevelConfig, clip_range: ClipRange) -> Tensor:
    """(B, T) bool, where clipping takes a token's gradient away; for loss types that clip.

    Args:
        ratio: (B, T), of each token's unit.
        advantages: (B, T) or (B, 1).
        args: `double_sided_clip` is read.
        clip_range: of the ratio.
    """
    if args.double_sided_clip:
        return is_outside(ratio, clip_range.low, clip_range.high) & (advantages != 0)
    return is_clipped(ratio, advantages, *clip_range)


def penalty(batch: MicroBatch, args: TurnLevelConfig) -> tuple[Tensor, Tensor]:
    """(B,) the clipping-triggered penalty of each trajectory, and (B,) the gate that weighs its KL.

    Args:
        batch: whose clip range is that of the gate too, on the sides where the gate has none of its own.
        args: `ctn_gate`, `ctn_epsilon`, `ctn_epsilon_high`, `clip_range_scaling`, `kl_estimator` and `turn_ratio` are
            read.
    """
    log_ratio, kept = batch.log_ratio, batch.turns.loss_mask
    of_token = batch.clip_ranges.tokens
    low = of_token.low if args.ctn_epsilon is None else args.ctn_epsilon
    own_high = args.ctn_epsilon if args.ctn_epsilon_high is None else args.ctn_epsilon_high
    high = of_token.high if own_high is None else own_high
    if args.ctn_gate == "token":
        gate = clip_fraction(log_ratio, kept, low, high)
        return clip_penalty(log_ratio, kept, low, high, args.kl_estimator), gate
    if args.ctn_gate == "turn":
        low, high, _ = scaled_to_units(ClipRange(low, high), batch.turns, "turn", args.clip_range_scaling_in_use)
        gate = turn_clip_fraction(log_ratio, batch.turns, low, high, args.turn_ratio)
    else:
        gate = log_ratio.new_ones(len(log_ratio))
    return gated_kl(gate, log_ratio, kept, args.kl_estimator), gate
