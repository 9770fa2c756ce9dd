"""Where and how long the stability benchmark trains: regimes, learning rates and seeds.

Regimes and the definition of a collapse were fixed before the judging seeds were run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from examples.quickstart import LIMITS, ExpertNoise, WarmStartConfig

from benchmarks.stability_methods import IN_TIME, METHODS, OF_QUESTIONS, OTHERS
from benchmarks.worlds import BenchmarkWorld, HuntWorld, QuestionWorld, WorkingWorld
from benchmarks.worlds.dated import HOPS

CHOOSING_SEEDS = (101, 102)
"""Chose every setting, with a few runs of seed 91: learning rates, coefficients, clip ranges, the regimes' settings.
In no table of results."""
JUDGING_SEEDS = (201, 202, 203, 204, 205, 206, 207, 208)
"""Chose no setting of a method. Eight, so that a paired test can speak; the first runs were of the first five. That
`sequence` is what held best was seen in those of questions and of `hunt-reuse`."""
_LONG_LIMITS = replace(LIMITS, max_turns=5, max_trajectory_tokens=192)
"""Four hops and one spare search."""
_LONG_WARM_START = WarmStartConfig(
    noise=ExpertNoise(missing_keyword=0.1, wrong_keyword=0.1, half_name=0.05, early_answer=0.05), limits=_LONG_LIMITS
)
SHORT = QuestionWorld("Questions", "one hop or two, turns of four tokens")
LONG = QuestionWorld(
    "Long questions", "three hops or four, turns of four tokens", (0.0, 0.0, 0.5, 0.5), _LONG_LIMITS, _LONG_WARM_START
)
HUNT = HuntWorld("Hunts", "a game of up to 8 turns of seven tokens, with an answer after each")


@dataclass(frozen=True)
class Regime:
    """A way to train, the same for all methods."""

    title: str
    description: str
    learning_rate: float
    """The common one."""
    learning_rates: tuple[float, ...] = ()
    """From which each method chooses its own; none where no method does."""
    world: BenchmarkWorld = SHORT
    trajectories: int = 64
    """Per rollout."""
    minibatch: int = 16
    """Trajectories per update."""
    epochs: int = 2
    """How often each trajectory is used."""
    rollouts: int = 20
    staleness: int = 0
    """How many rollouts late each is trained on."""
    methods: tuple[str, ...] = tuple(METHODS)
    """The methods that are run in it, by name."""

    @property
    def updates(self) -> int:
        """Per rollout."""
        return self.trajectories // self.minibatch * self.epochs


RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
"""Two steps of three on either side of a moderate one, so that what is chosen is not at an end."""
_OF_HUNTS = (
    *("grpo", "gspo", "gspo_authors", "gspo_length", "turn_geometric", "turn_sqrt", "so_grpo_specified", "so_grpo"),
    *("sequence", "so_grpo_turn", "so_grpo_penalty", "so_grpo_first", "so_grpo_fixed", "grpo_target", "so_middle"),
    *("turn_middle", "turn_of_tokens", "ppo", "so_ppo_specified", "so_ppo", "sequence_ppo", "so_ppo_first"),
    *("so_ppo_turn", "so_ppo_fixed", "ppo_target", *(name for name in OTHERS if name not in OF_QUESTIONS)),
)


def _without_those_in_time(methods: Iterable[str]) -> tuple[str, ...]:
    """What can be trained on late rollouts."""
    return tuple(name for name in methods if name not in IN_TIME)


_GENTLE: dict[str, Any] = {"trajectories": 128, "minibatch": 32, "rollouts": 15}
_HUNTS: dict[str, Any] = {"learning_rates": RATES, "world": HUNT, "methods": _OF_HUNTS}
REGIMES = {
    "gentle": Regime("Gentle", "8 updates per rollout at a moderate learning rate", 3e-4, **_GENTLE),
    "reuse": Regime("Reuse", "32 updates per rollout", 1e-3, (1e-4, 3e-4, 1e-3), epochs=8, rollouts=12),
    "stale": Regime(
        "Stale",
        "8 updates per rollout, each up to 6 rollouts late",
        1e-3,
        (1e-4, 3e-4, 1e-3),
        rollouts=32,
        staleness=6,
        methods=_without_those_in_time(METHODS),
    ),
    "hot": Regime("Hot", "as gentle, at a high learning rate", 2e-3, **_GENTLE),
    "long": Regime(
        "Long",
        "questions of 3 or 4 hops, 32 updates per rollout",
        5e-4,
        (5e-5, 1.5e-4, 5e-4),
        LONG,
        epochs=8,
        rollouts=12,
    ),
    "hunt-gentle": Regime("Hunts, gentle", "8 updates per rollout at a moderate rate", 3e-4, **_GENTLE, **_HUNTS),
    "hunt-reuse": Regime("Hunts, reuse", "32 updates per rollout", 1e-3, epochs=8, rollouts=15, **_HUNTS),
    "hunt-stale": Regime(
        "Hunts, stale",
        "8 updates per rollout, each up to 6 rollouts late",
        1e-3,
        rollouts=32,
        staleness=6,
        **_HUNTS | {"methods": _without_those_in_time(_OF_HUNTS)},
    ),
}

VERBOSITIES = (4, 10, 40, 80)
"""Of the worlds of `turn_length`: about how many tokens a turn has."""
SEEDS_PER_POLICY = 4
"""Four seeds start from the same policy: warm starts would otherwise take as long as the runs."""
COMPARED = {
    "ratios alone": {"token": "grpo", "turn": "turn_sqrt", "sequence": "gspo_length"},
    "with a target KL": {"token": "grpo_target", "turn": "so_grpo_turn", "sequence": "sequence"},
}
"""Setting to the method of each level. Each level has the clip range that was chosen for it: 0.2 for tokens, divided
by the square root of the length for turns and by the length for sequences."""
LONG_TURNS = (40, 80)
"""Verbosities at which the methods of other sources are run too: sequences are weakest there."""


LENGTH_REGIMES = {
    f"turns-of-{verbosity}-in-{HOPS}-hops": Regime(
        f"Turns of {verbosity} tokens, {HOPS} hops",
        "16 updates per rollout",
        3e-4,
        world=WorkingWorld(
            f"Working, {verbosity} tokens",
            f"{HOPS} hops",
            verbosity,
            seeds_per_policy=SEEDS_PER_POLICY,
            evaluation_questions=100,
        ),
        trajectories=32,
        minibatch=8,
        epochs=4,
        rollouts=5,
        methods=(
            *(name for of in COMPARED.values() for name in of.values()),
            *(OTHERS if verbosity in LONG_TURNS else ()),
        ),
    )
    for verbosity in VERBOSITIES
}
"""Of `turn_length`: the same questions with the same decisions, in turns of other lengths. Rollouts, their number and
the questions that judge are cut, by rules that were fixed before any judging run."""
