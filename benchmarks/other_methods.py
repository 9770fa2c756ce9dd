"""Methods of other sources than SORL, as settings of trainers: each as its source has it, and on our defaults.

Those of a source have token ratios and no target KL, as the source does, and differ from GRPO in what they are named
after. `so_…` is one of their switches on top of our defaults. Two need questions with answers and a `SearchRollout`,
which hunts have not: information gain, and void trajectories. `docs/methods/` has a page for each.
"""

from __future__ import annotations

from typing import Any

from benchmarks.method_settings import DEFAULTS, NONE, SYMMETRIC, TOKEN, TOKEN_PPO, Method, methods

_PLAIN = SYMMETRIC | TOKEN | NONE
_LEAVE_ONE_OUT = {"group_baseline": "leave_one_out", "scale_rewards": "none"}
_LOOP_RANGE = {"epsilon": 0.0909, "epsilon_high": 0.1}
_HIGHER = {"epsilon": 0.2, "epsilon_high": 0.28}
_TOP_K = {"group_filter": "top_k", "group_filter_share": 0.25}
_TOP_P = {"group_filter": "top_p", "group_filter_share": 0.9}
"""The share is ours: the source's is not known to us."""
_REFILL = {"group_filter": "zero_variance", "group_refill": 2}
_GAIN = {"information_gain_coef": 1.0, "turn_reward_normalization": "separate"}
_STEPS = {"step_advantage_coef": 1.0, "gamma": 0.95}
_LLDS = {"llds_coef": 0.2}
_BOTH_SIDES = {"double_sided_clip": True}
_VOID = {"mask_void_trajectories": True}
_MINIRL: dict[str, Any] = {"epsilon": 0.2, "epsilon_high": 0.27, "loss_type": "minirl", "scale_rewards": "none"}

_SOURCES = (
    methods(
        "so_grpo",
        ("plain", "GRPO, in our trainer", "what the others here add to; their control", _PLAIN),
        ("loop", "LOOP", "leave-one-out baseline, range .0909 and .1", _PLAIN | _LEAVE_ONE_OUT | _LOOP_RANGE),
        ("minirl", "MiniRL", "weighted policy gradient without a length in its mean", TOKEN | NONE | _MINIRL),
        ("top_k", "GRPO, top 25 % of groups", "StarPO-S's filter without its critic", _PLAIN | _TOP_K),
        ("top_p", "GRPO, top-p groups", "RAGEN-2's filter, 90 % of the variance", _PLAIN | _TOP_P),
        (
            "refill",
            "DAPO, bounded refill",
            "range .2 and .28, mean over tokens, groups that agree asked again at most twice",
            TOKEN | NONE | _HIGHER | _REFILL | {"loss_type": "dapo"},
        ),
        ("gigpo", "GiGPO", "turns of one state compared too", _PLAIN | _STEPS),
        ("llds", "GRPO + LLDS", "the likelihood of good trajectories is held up", _PLAIN | _LLDS),
        ("double_sided", "GRPO, double-sided clip", "SAO's clip", _PLAIN | _BOTH_SIDES),
        ("void", "GRPO, void trajectories masked", "SimpleTIR's mask", _PLAIN | _VOID),
        drawn=False,
    )
    | methods(
        "so_grpo",
        ("igpo", "IGPO", "information gain as turn rewards, outcome F1", _PLAIN | _GAIN),
        reward="f1",
        drawn=False,
    )
    | methods(
        "so_grpo",
        (
            "reinforce",
            "REINFORCE",
            "Search-R1++'s: one update per rollout, advantages scaled over the batch",
            _PLAIN | {"scale_rewards": "batch", "loss_type": "dapo"},
        ),
        passes="one",
        drawn=False,
    )
    | methods(
        "seeupo",
        ("seeupo", "SeeUPO", "turn by turn, the last one first; turn ratios", SYMMETRIC | {"target_kl": 0.0}),
        passes="turns",
        drawn=False,
    )
    | methods(
        "so_ppo",
        (
            "starpo_s",
            "StarPO-S",
            "PPO, range .2 and .28, top 25 % of groups",
            TOKEN | NONE | _HIGHER | TOKEN_PPO | _TOP_K | {"loss_type": "dapo", "num_generations": 8},
        ),
        drawn=False,
    )
)
_ON_DEFAULTS = methods(
    "so_grpo",
    ("so_loop", "defaults, leave one out", "no scale: LOOP's advantages", DEFAULTS | _LEAVE_ONE_OUT),
    ("so_llds", "defaults + LLDS", "the likelihood of good trajectories is held up", DEFAULTS | _LLDS),
    ("so_double", "defaults, double-sided clip", "SAO's clip", DEFAULTS | _BOTH_SIDES),
    ("so_top_p", "defaults, top-p groups", "90 % of the variance", DEFAULTS | _TOP_P),
    ("so_refill", "defaults, bounded refill", "groups that agree asked again at most twice", DEFAULTS | _REFILL),
    ("so_gigpo", "defaults, GiGPO's turns", "turns of one state compared too", DEFAULTS | _STEPS),
    (
        "so_steps",
        "defaults, GiGPO's turns, γ = 1",
        "the same without a discount, added once that was seen to cost",
        DEFAULTS | {"step_advantage_coef": 1.0},
    ),
    (
        "so_gamma",
        "defaults, γ = .95",
        "the control of GiGPO's turns, which are discounted",
        DEFAULTS | {"gamma": 0.95},
    ),
    ("so_void", "defaults, void trajectories masked", "SimpleTIR's mask", DEFAULTS | _VOID),
    tuned=False,
    drawn=False,
) | methods(
    "so_grpo",
    ("so_igpo", "defaults, information gain", "outcome F1", DEFAULTS | _GAIN),
    tuned=False,
    reward="f1",
    drawn=False,
)
OTHER_METHODS: dict[str, Method] = _SOURCES | _ON_DEFAULTS
OF_QUESTIONS = ("igpo", "void", "so_igpo", "so_void")
"""What hunts have no use for: they have no answers and no `SearchRollout`."""
IN_TIME = tuple(name for name, method in OTHER_METHODS.items() if method.passes == "turns")
"""What cannot be trained on late rollouts: it takes the old log-probabilities again, turn by turn."""
