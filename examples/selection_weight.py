"""Weights π/q that correct for choosing trajectories among M candidates, under best-of-M sampling.

They are optional, for a comparison with training on the chosen trajectories without weights:

trainer = SOGRPOTrainer(
    model,
    [exact_match_reward, selection_ratio],
    SOGRPOConfig(reward_weights=[1.0, 0.0], ...),
    dataset,
    rollout_func=SearchRollout(search, candidates=BestOfTurns(4, score)),
    method=Method(credit=weighted),
)
"""

import math

from sorl_trl.methods.method import group_mean_advantages


def selection_ratio(trajectory, **_):
    """π/q of each trajectory, the product over its turns: a reward function with weight 0. None if a search was down.

    The probabilities of scores are the shares of candidates that have them, so the ratio is a biased estimate. A beam
    records no scores, because the formula assumes a greedy choice.
    """
    down = [each.stop_reason.is_infrastructure_failure for each in trajectory]
    ratios = [math.prod(_ratio(turn.scores) for turn in each.turns if turn.scores) for each in trajectory]
    return [None if is_down else ratio for is_down, ratio in zip(down, ratios, strict=True)]


def _ratio(scores):
    at_most, below = (sum(map(own, scores)) / len(scores) for own in (scores[0].__ge__, scores[0].__gt__))
    return 1 / best_of_ratio(at_most, below, len(scores))


def best_of_ratio(at_most, below, candidates):
    """q/π of the best of M candidates, (F^M − F⁻^M) / (F − F⁻) = Σ_j F^j F⁻^(M−1−j) (ours).

    F (`at_most`) and F⁻ (`below`) are the probabilities under π of a score of at most, and below, that of the best.
    """
    return sum(at_most**j * below ** (candidates - 1 - j) for j in range(candidates))


def weighted(rollout):
    """Credit: (N, K) advantages of GRPO, times π/q of the trajectory."""
    ratio = rollout.totals("selection_ratio").nan_to_num(1.0)
    return group_mean_advantages(rollout) * ratio.unsqueeze(1)
