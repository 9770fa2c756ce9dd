"""The learning rate that the stability benchmark judges with."""

from __future__ import annotations

from typing import Any

from benchmarks.stability_plan import CHOOSING_SEEDS
from benchmarks.stability_report import rate_of


def test_no_rate_is_chosen_before_all_first_rates_have_run() -> None:
    """Or a study that was interrupted would judge with a rate that a later one beats."""

    def rows(scores: dict[float, float]) -> list[dict[str, Any]]:
        made = {"column": "reuse", "arm": "grpo"}
        return [
            {**made, "rate": rate, "seed": seed, "score": score}
            for rate, score in scores.items()
            for seed in CHOOSING_SEEDS
        ]

    found = rows({3e-5: 0.4, 1e-4: 0.5, 3e-4: 0.45})
    assert rate_of(found, "reuse", "grpo") is None
    assert rate_of(found + rows({1e-3: 0.3}), "reuse", "grpo") == 1e-4
    assert rate_of(found + rows({1e-3: 0.6}), "reuse", "grpo") is None, "the next rate has to run"
