"""The page of `python -m benchmarks.critic_ceiling`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
TURNS = 3
"""Shown; a fourth turn is rare and never rewarded here."""
READING = Path(__file__).parent / "critic_reading.md"
"""What we conclude, written by hand."""


def write_report(places: Sequence[Mapping[str, Any]]) -> None:
    """Write the figures as JSON, and the tables with our reading of them as Markdown.

    Args:
        places: as `critic_ceiling.read` returns them; of one without a ceiling there is only what is missing.
    """
    missing = _missing(places)
    places = [place for place in places if place["ceiling"] is not None]
    (RESULTS / "critic_ceiling.json").write_text(json.dumps(places, indent=1).replace("NaN", "null") + "\n")
    text = "\n".join(
        [
            "# What a critic could explain, and what it does\n",
            "Explained variance of the return, over the states in which turns start. Written by "
            "`python -m benchmarks.critic_ceiling`, on seeds that chose settings.\n",
            "## The ceiling\n",
            "1 − E[Var(R | s)] / Var(R), from 16 continuations of each of up to 256 states per turn, with 95 % "
            "intervals (bootstrap over states).\n",
            *_ceilings(places),
            "\n## What the critic's architecture reaches by regression\n",
            "On trajectories of the frozen policy, starting from the warm-started backbone and a head of zeros, as in "
            "a run; of 2,048 held-out trajectories, after the epoch that was best for them.\n",
            *_regressions(places),
            "\n## What the critics of SO-PPO runs reach, with our first defaults\n",
            "At the end of a run, on 2,048 fresh trajectories of the run's own last policy.\n",
            *_reached(places),
            *missing,
            "\n" + READING.read_text(),
        ]
    )
    (RESULTS / "critic_ceiling.md").write_text(text)
    print(text)


def _missing(places: Sequence[Mapping[str, Any]]) -> list[str]:
    incomplete = [place for place in places if place["missing"]]
    lines = [f"- {place['policy']}, seed {place['seed']}: {', '.join(place['missing'])}" for place in incomplete]
    return ["\n## Not measured yet\n", *lines] if lines else []


def _ceilings(places: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| policy | seed | EM | all turns | " + " | ".join(f"turn {k}" for k in range(TURNS)) + " |"]
    lines.append("|---" * (4 + TURNS) + "|")
    for place in places:
        ceiling = place["ceiling"]
        turns = list(zip(ceiling["by_turn"], ceiling["intervals"], strict=True))[:TURNS]
        cells = [_with_interval(ceiling["overall"], ceiling["interval"]), *(_with_interval(*turn) for turn in turns)]
        cells += [""] * (1 + TURNS - len(cells))
        lines.append(f"| {place['policy']} | {place['seed']} | {ceiling['sampled_em']:.2f} | {' | '.join(cells)} |")
    return lines


def _regressions(places: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| policy | seed | trajectories | epochs | all turns by epoch | all turns | " + _turn_titles() + " |"]
    lines.append("|---" * (6 + TURNS) + "|")
    for place in places:
        for size, curve in place["regression"].items():
            best = max(curve, key=lambda epoch: epoch["overall"])
            by_epoch = " ".join(_figure(epoch["overall"]) for epoch in curve)
            cells = [place["policy"], place["seed"], size, best["epoch"], by_epoch, *_explained(best)]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _reached(places: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| run | seed | last 5 rollouts | all turns | " + _turn_titles() + " | ceiling |"]
    lines.append("|---" * (5 + TURNS) + "|")
    for place in places:
        if (reached := place["critic"]) is not None:
            during = [value for value in reached["during"][-5:] if value is not None]
            cells = [_figure(sum(during) / len(during)), *_explained(reached), _figure(place["ceiling"]["overall"])]
            lines.append(f"| {place['policy']} | {place['seed']} | " + " | ".join(cells) + " |")
    return lines


def _turn_titles() -> str:
    return " | ".join(f"turn {k}" for k in range(TURNS))


def _explained(figures: Mapping[str, Any]) -> list[str]:
    turns = (figures["by_turn"] + [math.nan] * TURNS)[:TURNS]
    return [_figure(figures["overall"]), *map(_figure, turns)]


def _with_interval(value: float, interval: Sequence[float]) -> str:
    low, high = interval
    return "" if math.isnan(value) else f"{_figure(value)} ({_figure(low)} to {_figure(high)})"


def _figure(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"
