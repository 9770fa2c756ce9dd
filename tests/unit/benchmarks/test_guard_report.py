"""The page of the guard's rules, of runs made by hand."""

from __future__ import annotations

from benchmarks.guard_curve import achieved
from benchmarks.guard_report import report
from benchmarks.guard_rules import fit_others, fit_shapes
from benchmarks.guard_runs import Part
from benchmarks.guard_templates import BY_HAND, FITTED, in_use
from benchmarks.stability_statistics import Run

from tests.unit.benchmarks.runs import a_record, evaluations

LOST = [0.5, 0.5, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]
HELD = [0.5] * 10


def a_run(seed: int, regime: str, rewards: list[float], kl: list[float]) -> Run:
    """It collapses where the reward falls."""
    ended = evaluations(0.5, 0.8, 0.8 if rewards[-1] else 0.1, every=5)
    rollouts = [{"reward": reward, "kl_to_old": of} for reward, of in zip(rewards, kl, strict=True)]
    return Run(a_record(seed=seed, regime=regime) | {"evaluations": ended, "rollouts": rollouts})


def a_part(seed: int) -> Part:
    """Two runs that collapse, one with a KL that says so before, and two that hold, one with a high KL."""
    calm, early, high = [0.0] * 10, [0.0] + [0.5] * 9, [0.0] * 5 + [0.5] * 5
    made = [("wild", LOST, early), ("calm", LOST, calm), ("wild", HELD, high), ("calm", HELD, calm)]
    runs = [a_run(seed, *each) for each in made]
    runs[0].record["method"] = "llds"
    part = Part.of(runs)
    part.sets["fitted"] = part.tables.alarms({"high_kl": None})
    return part


def test_a_part_has_the_alarms_of_the_rules() -> None:
    part = a_part(11)
    assert part.outcomes.onsets[:2].tolist() == [5, 5]
    assert part.own["high_kl"].tolist() == [3, float("inf"), 7, float("inf")]
    assert part.sets["in use"].tolist() == part.sets["by hand"].tolist() == [3, 7, 7, float("inf")]


def test_the_page() -> None:
    choosing, judging = a_part(1), a_part(11)
    found = {
        "thresholds": {name: {"by hand": BY_HAND[name], "fitted": None, "in use": in_use()[name]} for name in FITTED},
        "judged": {"in use": achieved(judging.sets["in use"], judging.outcomes)},
        "curve": [{"rules": "high_kl", "budget": 0.05, **achieved(judging.own["high_kl"], judging.outcomes)}],
    }
    shapes, others = fit_shapes(choosing.tables), fit_others(choosing.outcomes, judging.outcomes)
    titles = {"calm": ("Flat", "Calm"), "wild": ("High", "Wild"), "never": ("High", "Never run")}
    lines = report(choosing, judging, found, shapes, others, titles).splitlines()
    assert "- 4 judging runs, of which 2 collapse (seeds 11)." in lines
    text = next(line for line in lines if line.startswith("Of 2 runs"))
    assert "see 2 at some time, 1 before the collapse begins, and 1 at least 2 rollouts before" in text
    assert any(
        line.startswith("There is an alarm in 1 of 2 healthy runs. By regime: wild 100%, calm 0%.") for line in lines
    )
    assert f"| `high_kl` | threshold | 0.2 | – | {in_use()['high_kl']:g} |" in lines
    assert "| judging seeds: thresholds in use | 2 of 2 | 1 of 2 | 0 of 0 | 1 of 2 | 0.67 | 0 |" in lines
    assert "| regime: Wild | 1 of 1 | 1 of 1 | 0 of 0 | 1 of 1 | 0.50 | 2 |" in lines
    assert "| methods of other sources, and on our defaults | 1 of 1 | 1 of 1 | 0 of 0 | 0 of 0 | 1.00 | 2 |" in lines
    assert not any("Never run" in line for line in lines)
    (curve,) = (line for line in lines if line.startswith("| `high_kl` | 5.0% |"))
    assert "| 50.0% [0.0%, 100.0%] | 50.0% [0.0%, 100.0%] | 50.0% [0.0%, 100.0%] | 2 |" in curve
    (own,) = (line for line in lines if line.startswith("| `high_kl` | **patience 2** |"))
    assert own == "| `high_kl` | **patience 2** | 0.51 | 2 | 0 | 0 |"
