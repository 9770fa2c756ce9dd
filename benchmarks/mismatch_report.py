"""The tables of `benchmarks.engine_mismatch`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.stability_report import lines_of_table

LEAST = 0.9995
"""A share that is 1 in a table of three digits."""
NOTHING_CUT = "Every correction keeps every trajectory.\n"
BINS = (0, 100, 200, 300, 400, 10_000)
"""Model tokens of a trajectory."""
HEADER = """# What corrections of an engine's mismatch keep

Written by `python -m benchmarks.engine_mismatch`, seed {seed}: a real vLLM on a CPU samples, a float32 trainer scores
the same trajectories with each correction. d is the trainer's log-probability of a token less the engine's. Every
correction saw the same trajectories, so that figures of a column compare; one policy of 0.2 million parameters per
world, so that the size of d is no forecast for a larger one. How far a correction cuts for a given size of d is.
"""
KEPT = """Of each correction: tokens that stay in the loss · trajectories that leave it whole · effective share of the
tokens, (Σw)²/Σw² over all of them, which a few heavy weights lower as dropping does.
"""
BY_LENGTH = """Share of a trajectory's tokens that stays, by its model tokens; the number of trajectories in brackets.
"""


def write_report(figures: dict[str, Any], path: Path) -> None:
    """Write the page of what `engine_mismatch` has measured."""
    path.write_text("\n".join(blocks(figures)).replace("\n\n\n", "\n\n").rstrip() + "\n")


def blocks(figures: dict[str, Any]) -> Iterator[str]:
    settings = figures["settings"]
    yield HEADER.format(seed=figures["seed"])
    yield differences_table(settings)
    yield f"## What is kept\n\n{KEPT}"
    for world in dict.fromkeys(each["world"] for each in settings):
        yield f"### {world.capitalize()}\n\n{kept_table([each for each in settings if each['world'] == world])}"
    yield f"## By length\n\n{BY_LENGTH}"
    for engine in dict.fromkeys(each["engine"] for each in settings):
        of_engine = [each for each in settings if each["engine"] == engine]
        cut = any(found["tokens_kept"] < LEAST for each in of_engine for found in each["corrections"])
        yield f"### {engine}\n\n{length_table(of_engine) if cut else NOTHING_CUT}"


def differences_table(settings: Sequence[dict[str, Any]]) -> str:
    """How far each engine was from the trainer."""
    names = ("world", "engine", "trajectories", "tokens of each", "mean abs d", "largest", "spread of Σd", "of a turn")
    return lines_of_table(
        names,
        [
            (
                each["world"],
                each["engine"],
                str(len(each["tokens"])),
                f"{min(each['tokens'])}–{max(each['tokens'])}, mean {statistics.fmean(each['tokens']):.0f}",
                f"{each['mean_difference']:.2g}",
                f"{each['max_difference']:.2g}",
                f"{statistics.pstdev(each['sum_by_trajectory']):.2g}",
                f"{each['max_turn_difference']:.2g}",
            )
            for each in settings
        ],
    )


def kept_table(settings: Sequence[dict[str, Any]]) -> str:
    """Corrections by engines, in one world."""
    body = [
        [each["title"], *(kept_cell(setting["corrections"][place]) for setting in settings)]
        for place, each in enumerate(settings[0]["corrections"])
    ]
    return lines_of_table(["correction", *(setting["engine"] for setting in settings)], body)


def kept_cell(found: dict[str, Any]) -> str:
    return f"{found['tokens_kept']:.3f} · {found['trajectories_gone']:.3f} · {found['effective_share']:.3f}"


def length_table(settings: Sequence[dict[str, Any]]) -> str:
    """Corrections by lengths of trajectories, of one engine in all worlds."""
    tokens = [length for each in settings for length in each["tokens"]]
    bins = [(low, high) for low, high in pairwise(BINS) if any(low <= length < high for length in tokens)]
    titles = [
        f"{low}–{high - 1} ({sum(low <= length < high for length in tokens)})"
        if high < BINS[-1]
        else f"{low} and more ({sum(low <= length for length in tokens)})"
        for low, high in bins
    ]
    body = []
    for place, each in enumerate(settings[0]["corrections"]):
        kept = [share for setting in settings for share in setting["corrections"][place]["kept_by_trajectory"]]
        cells = [
            _mean([share for share, length in zip(kept, tokens, strict=True) if low <= length < high])
            for low, high in bins
        ]
        body.append([each["title"], *(f"{cell:.3f}" for cell in cells)])
    return lines_of_table(["correction", *titles], body)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan
