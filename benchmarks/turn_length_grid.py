"""What is run to see whether the turn beats the token and the sequence as turns grow longer and more.

The same questions with the same decisions, written in turns of 4 to 80 tokens; and of two to four hops, in turns of
10 tokens. In each, three ratios, which differ in what belongs to their level, the clip range among it: alone, and with
a target KL. In the longest turns, the methods of other sources too.

As many updates as the stability benchmark has would take more than half a day of one core. What is cut, by rules that
were fixed before any judging run: rollouts are `SMALLER` and fewer; four seeds share a policy; half as many questions
judge; where hops vary, ratios are compared alone.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.other_methods import OTHER_METHODS
from benchmarks.stability_grid import REGIMES
from benchmarks.worlds import WorkingWorld

BASE = "working-reuse"
"""The regime whose staleness and learning rate all have."""
SMALLER = {"trajectories": 32, "minibatch": 8, "epochs": 4, "rollouts": 5}
"""Than in the base: 16 updates per rollout, of half as many trajectories each, and 5 rollouts instead of 12."""
EVALUATION_QUESTIONS = 100
HOPS = 3
VERBOSITY = 10
SEEDS_PER_POLICY = 4
"""Four seeds start from the same policy: with six worlds, warm starts would otherwise take as long as the runs."""
SHAPES = (*((verbosity, HOPS) for verbosity in (4, 10, 40, 80)), *((VERBOSITY, hops) for hops in (2, 4)))
"""Verbosity and hops of each world: one of the two varies, the other stays."""
LONG_TURNS = (40, 80)
"""Verbosities at which the methods of other sources are run too: our defaults are weakest there."""

ALONE = "ratios alone"
OF_TOKENS = "with a target KL, all means over tokens"
SETTINGS = {
    ALONE: {"token": "grpo", "turn": "turn_sqrt", "sequence": "gspo_length"},
    "with a target KL": {"token": "grpo_target", "turn": "so_grpo_turn", "sequence": "so_grpo"},
    OF_TOKENS: {"token": "grpo_target", "turn": "turn_of_tokens", "sequence": "so_grpo"},
}
"""Setting to the method of each level, named in `stability_methods.py`. Each level has the clip range that was chosen
for it: 0.2 for tokens, divided by the square root of the length for turns and by the length for sequences."""


def _methods_at(verbosity: int, hops: int) -> tuple[str, ...]:
    compared = (methods for name, methods in SETTINGS.items() if hops == HOPS or name == ALONE)
    others = OTHER_METHODS if verbosity in LONG_TURNS else ()
    return tuple(dict.fromkeys([*(method for methods in compared for method in methods.values()), *others]))


def _regime_name(verbosity: int, hops: int) -> str:
    return f"turns-of-{verbosity}-in-{hops}-hops"


LENGTH_REGIMES = {
    _regime_name(verbosity, hops): replace(
        REGIMES[BASE],
        title=f"Turns of {verbosity} tokens, {hops} hops",
        description="16 updates per rollout",
        learning_rates=(),
        methods=_methods_at(verbosity, hops),
        world=WorkingWorld(
            f"Working, {verbosity} tokens",
            f"{hops} hops",
            verbosity,
            hops,
            seeds_per_policy=SEEDS_PER_POLICY,
            evaluation_questions=EVALUATION_QUESTIONS,
        ),
        **SMALLER,
    )
    for verbosity, hops in SHAPES
}
WITH_OTHERS = {name: regime for name, regime in LENGTH_REGIMES.items() if regime.world.verbosity in LONG_TURNS}
"""Those in which the methods of other sources are run."""
