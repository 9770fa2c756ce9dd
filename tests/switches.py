"""What can be switched on beside each other: factors, their values, and what is refused of them by name."""

from __future__ import annotations

from typing import Any

from tests.covering import Rule
from tests.mismatch import MASK, TRUNCATE, VETO

CRITICS = ("head", "trunk", "adapter", "model")
WITHOUT_MIN = ("cispo", "sapo", "vespo")
OF_SEQUENCES = ("turn", "grpo", "dr_grpo", "dapo", "bnpo", "luspo")
"""Loss types whose ratios are of sequences where no level is set."""
SCALED = ("sqrt_length", "length")
NOT_OF_TURNS = ("none", "kl_by_token", "kl_everywhere", "bias_norm")
"""Normalizations whose gate, if any, counts no turns."""
KL = {"clip_normalization": "kl_penalty", "ctn_coef": 1.0}
FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "trainer": {"grpo": {}, **{kind: {"critic": kind} for kind in ("head", "adapter", "model")}}
    | {"trunk": {"critic": "head", "critic_trunk_gradient": True}},
    "engine": {"rollout_func": {}, "search": {}, "tools": {}},
    "mismatch": {
        "off": {},
        "veto": VETO,
        "turn_mask": MASK,
        "turn_truncate": TRUNCATE,
    },
    "loss": {
        **{
            name: {"loss_type": name} for name in ("turn", "grpo", "dr_grpo", "dapo", "bnpo", "luspo", "sapo", "vespo")
        },
        "minirl": {"loss_type": "minirl", "minirl_cap": 1.01},
        "cispo": {"loss_type": "cispo", "epsilon_high": 1.01},
    },
    "level": {"unset": {}, **{name: {"importance_sampling_level": name} for name in ("token", "turn", "sequence")}},
    "scaling": {"unset": {}, **{name: {"clip_range_scaling": name} for name in ("none", *SCALED)}},
    "turn_ratio": {"geometric": {}, "arithmetic": {"turn_ratio": "arithmetic"}},
    "normalization": {
        "none": {},
        "kl_by_token": KL,
        "kl_by_turn": {**KL, "ctn_gate": "turn"},
        "kl_everywhere": {**KL, "ctn_gate": "none"},
        "bias_norm": {"clip_normalization": "bias_norm"},
    },
    "double_sided": {"off": {}, "on": {"double_sided_clip": True}},
    "llds": {"off": {}, "on": {"llds_coef": 0.5}},
    "baseline": {"mean": {}, "leave_one_out": {"group_baseline": "leave_one_out"}},
    "filter": {
        "none": {},
        "zero_variance": {"group_filter": "zero_variance"},
        **{name: {"group_filter": name, "group_filter_share": 0.5} for name in ("top_k", "top_p")},
    },
    "filter_reward": {"sum": {}, "named": {"group_filter_reward": "outcome_reward"}},
    "refill": {"off": {}, "on": {"group_refill": 1}},
    "void": {"off": {}, "on": {"mask_void_trajectories": True}},
    "turn_rewards": {"together": {}, "separate": {"turn_reward_normalization": "separate"}},
    "gain": {"off": {}, "on": {"information_gain_coef": 1.0, "information_gain_column": "answer"}},
    "step": {"off": {}, "on": {"step_advantage_coef": 1.0}},
    "gamma": {"1": {}, "0.9": {"gamma": 0.9}},
    "scale": {name: {"scale_rewards": name} for name in ("none", "group", "batch")},
    "target_kl": {"off": {"target_kl": 0.0}, "on": {"target_kl": 0.005}},
    "advantages": {"of_turns": {}, "of_tokens": {"advantage_level": "token"}},
    "rewards": {"outcome": {}, "both": {}},
}
"""Factor -> its values -> what each says in the config; the first value is what a config has where it says nothing."""
DROPPING: tuple[tuple[str, Rule], ...] = (
    ("group_filter", {"filter": ("zero_variance", "top_k", "top_p")}),
    ("mask_void_trajectories", {"void": ("on",)}),
    ("mismatch_veto", {"mismatch": ("veto",)}),
    ("vllm_importance_sampling_mode", {"mismatch": ("turn_mask",)}),
)
"""What takes trajectories out of the loss, and where it does."""
REFUSED: tuple[tuple[Rule, tuple[str, ...]], ...] = (
    *(({"loss": ("bnpo",), **where}, ("loss_type", option)) for option, where in DROPPING),
    *(
        ({"double_sided": ("on",), **where}, ("double_sided_clip", option))
        for option, where in (
            ("loss_type", {"loss": (*WITHOUT_MIN, "minirl")}),
            ("clip_normalization", {"normalization": ("bias_norm",)}),
        )
    ),
    ({"loss": (*WITHOUT_MIN, "minirl"), "normalization": ("bias_norm",)}, ("clip_normalization", "loss_type")),
    ({"trainer": ("trunk",), "normalization": ("bias_norm",)}, ("critic_trunk_gradient", "clip_normalization")),
    *(
        ({"scaling": SCALED, "normalization": NOT_OF_TURNS, **where}, ("clip_range_scaling", name))
        for name, where in (
            ("importance_sampling_level", {"level": ("token",)}),
            ("loss_type", {"loss": WITHOUT_MIN}),
            ("loss_type", {"loss": ("minirl",), "level": ("unset",)}),
        )
    ),
    *(
        ({"scaling": ("length",), "turn_ratio": ("arithmetic",), **where}, ("clip_range_scaling", "turn_ratio"))
        for where in ({"level": ("turn",)}, {"normalization": ("kl_by_turn",)})
    ),
    (
        {
            **{"scaling": ("unset",), "level": ("unset",), "turn_ratio": ("arithmetic",)},
            **{"normalization": ("kl_by_turn",), "loss": OF_SEQUENCES},
        },
        ("clip_range_scaling", "turn_ratio", "ctn_gate"),
    ),
    ({"trainer": CRITICS, "baseline": ("leave_one_out",)}, ("group_baseline",)),
    ({"trainer": CRITICS, "refill": ("on",)}, ("group_refill",)),
    ({"trainer": CRITICS, "turn_rewards": ("separate",)}, ("turn_reward_normalization",)),
    ({"trainer": CRITICS, "step": ("on",)}, ("step_advantage_coef",)),
    ({"trainer": ("grpo",), "advantages": ("of_tokens",)}, ("advantage_level",)),
    ({"baseline": ("leave_one_out",), "scale": ("group", "batch")}, ("group_baseline", "scale_rewards")),
    ({"baseline": ("leave_one_out",), "turn_rewards": ("separate",)}, ("group_baseline", "turn_reward_normalization")),
    ({"refill": ("on",), "filter": ("none",)}, ("group_refill", "group_filter")),
    ({"refill": ("on",), "scale": ("batch",)}, ("group_refill", "scale_rewards")),
    ({"filter_reward": ("named",), "filter": ("none",)}, ("group_filter_reward", "group_filter")),
)
"""What a config does not take together, and what it names then."""

BY_THE_TRAINER: tuple[tuple[Rule, tuple[str, ...]], ...] = (
    ({"engine": ("tools",), "void": ("on",)}, ("mask_void_trajectories", "rollout_func")),
)
"""What the trainer does not take together, and what it names then."""
SAID: tuple[tuple[Rule, str], ...] = (({"trainer": CRITICS, "scale": ("group", "batch")}, "scale_rewards"),)
"""What has no effect, so that no row tries it, and the option that a warning names."""
NEEDS_VLLM: Rule = {"engine": ("search", "tools"), "mismatch": ("veto", "turn_mask", "turn_truncate")}
"""These engines have no log-probabilities but vLLM's."""

METRICS: tuple[tuple[Rule, tuple[str, ...]], ...] = (
    ({"mismatch": ("veto",)}, ("mismatch/vetoed_trajectories",)),
    *(
        ({"mismatch": (mode,), "loss": tuple(name for name in FACTORS["loss"] if name != "minirl")}, (metric,))
        for mode, metric in (("turn_mask", "mismatch/dropped_turns"), ("turn_truncate", "mismatch/cut_weights"))
    ),
    ({"loss": ("minirl",)}, ("minirl/capped_weights", "clip_ratio/region_mean")),
    ({"double_sided": ("on",)}, ("clip_ratio/region_mean",)),
    ({"llds": ("on",)}, ("llds/loss", "llds/open_turns")),
    ({"baseline": ("leave_one_out",)}, ("advantages/without_baseline",)),
    ({"filter": ("zero_variance", "top_k", "top_p")}, ("groups/kept", "groups/kept_std", "groups/kept_reward")),
    ({"refill": ("on",)}, ("groups/refill_rounds", "groups/refilled", "groups/left")),
    ({"void": ("on",)}, ("trajectories_void",)),
    ({"turn_rewards": ("separate",)}, ("turns/rewarded",)),
    ({"gain": ("on",)}, ("information_gain/mean", "information_gain/missing")),
    ({"step": ("on",)}, ("turns/shared_state",)),
    ({"normalization": ("kl_by_token", "kl_by_turn", "kl_everywhere")}, ("clip_penalty", "clip_penalty_gate")),
    ({"normalization": ("bias_norm",)}, ("clipping_bias_norm",)),
    ({"scaling": SCALED}, ("clip_range/low", "clip_range/high")),
    ({"target_kl": ("on",)}, ("lr_factor",)),
)
"""Where a switch is on, and the metrics that say what it did in a step."""
