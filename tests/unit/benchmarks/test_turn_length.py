"""The comparison of ratios over the length and the number of turns, from records made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.other_methods import OTHER_METHODS
from benchmarks.stability_grid import JUDGING_SEEDS
from benchmarks.turn_length import PANELS, jobs
from benchmarks.turn_length_grid import LENGTH_REGIMES, OF_TOKENS, SEEDS_PER_POLICY, SETTINGS
from benchmarks.turn_length_report import draw, length_rows, table, write_turn_length

from tests.unit.benchmarks.runs import a_record

ALONE = {"ratios alone": {"token": "grpo", "turn": "turn_geometric", "sequence": "gspo"}}


def a_run(method: str, seed: int, em: float, tokens: float = 4.0, regime: str = "short") -> dict[str, Any]:
    """Turns of `tokens` tokens in the first rollout, of twice as many in the second."""
    rollouts = [
        {"rollout/tokens_per_turn": each, "rollout/turns_per_trajectory": 3.0} for each in (tokens, 2 * tokens)
    ]
    return a_record(method, seed, em, regime) | {"rollouts": rollouts, "policy_parameters": 1000}


def three_ratios() -> list[dict[str, Any]]:
    """Turns are .1 and .3 above tokens, .1 below sequences on the seed that both have."""
    made = [a_run("grpo", 1, 0.4), a_run("grpo", 2, 0.2), a_run("turn_geometric", 1, 0.5)]
    return [*made, a_run("turn_geometric", 2, 0.5, tokens=6.0), a_run("gspo", 2, 0.6)]


class TestRows:
    def test_by_hand(self) -> None:
        token, sequence = length_rows(three_ratios(), ALONE)
        assert (token["contrast"], sequence["contrast"]) == ("turn-token", "turn-sequence")
        assert token["difference"] == pytest.approx((0.1 + 0.3) / 2)
        assert token["interval"] == pytest.approx([0.1, 0.3])
        assert token["p"] == 0.5  # two of the four ways to flip two signs are as far from 0
        assert (token["seeds"], token["setting"]) == ([1, 2], "ratios alone")
        assert token["turn_tokens"] == pytest.approx((4 + 4 + 4 + 6) / 4)
        assert (token["turns"], token["policy_parameters"]) == (3.0, 1000)
        assert sequence["difference"] == pytest.approx(-0.1)
        assert (sequence["seeds"], sequence["interval"]) == ([2], None)
        assert sequence["turn_tokens"] == pytest.approx((4 + 6) / 2)

    def test_regimes_and_settings_do_not_mix(self) -> None:
        made = [*three_ratios(), a_run("turn_geometric", 1, 0.9, regime="long"), a_run("gspo", 1, 0.5, regime="long")]
        rows = length_rows(made, {**ALONE, "with the rest": {"token": "a", "turn": "b", "sequence": "c"}})
        found = [(row["regime"], row["contrast"], row["setting"]) for row in rows]
        short = [("short", contrast, "ratios alone") for contrast in ("turn-token", "turn-sequence")]
        assert found == [*short, ("long", "turn-sequence", "ratios alone")]
        assert rows[-1]["difference"] == pytest.approx(0.4)

    def test_a_table_of_them(self) -> None:
        lines = table(length_rows(three_ratios(), ALONE)).splitlines()
        assert lines[2] == "| 4.5 | 3.0 | ratios alone | turn-token | +0.200 [+0.100, +0.300] | 0.5 | 2 |"
        assert lines[3] == "| 5.0 | 3.0 | ratios alone | turn-sequence | -0.100 | 1 | 1 |"


def test_what_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = three_ratios()
    rows = length_rows(records, ALONE)
    write_turn_length(records, rows, tmp_path, {"turn_tokens": {"short"}, "turns": set()})
    assert json.loads((tmp_path / "turn_length.json").read_text()) == rows
    page = (tmp_path / "turn_length.md").read_text()
    assert "5 runs" in page
    assert "Seeds 1 to 2 start from one policy" in page
    assert "| short | GSPO | 0.300 | 0.600 | 0.700 | 0 of 1 |" in page
    assert (tmp_path / "turn_length.png").stat().st_size > 5000


def test_a_tick_for_every_number_of_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    rows = [row | {"turns": turns} for row in length_rows(three_ratios(), ALONE) for turns in (2.6, 5.0)]
    draw(rows, {"turn_tokens": {"short"}, "turns": {"short"}}, tmp_path / "any.png")
    assert list(figures[0].axes[1].get_xticks()) == [2, 3, 4, 5]
    assert [label.get_text() for label in figures[0].axes[0].get_xticklabels()] == ["4", "5"]


class TestPlan:
    def test_in_each_panel_one_thing_varies(self) -> None:
        for key, regimes in PANELS.items():
            worlds = [LENGTH_REGIMES[name].world for name in regimes]
            shapes = {"turn_tokens": {w.verbosity for w in worlds}, "turns": {w.hops for w in worlds}}
            fixed = "turns" if key == "turn_tokens" else "turn_tokens"
            assert len(shapes[key]) == len(worlds) >= 3
            assert len(shapes[fixed]) == 1

    def test_every_world_has_every_judging_seed_and_a_target_kl_where_length_varies(self) -> None:
        plan = list(jobs())
        others = 2 * len(OTHER_METHODS)  # in the longest turns
        assert len(set(plan)) == len(plan) == (4 * 7 + 2 * 3 + others) * len(JUDGING_SEEDS)
        assert {job.regime for job in plan if job.method == "so_grpo_turn"} == PANELS["turn_tokens"]

    def test_half_of_the_plan_has_every_policy(self) -> None:
        plan = list(jobs())
        seeds = {job.seed for job in plan[: len(plan) // 2]}
        assert len(seeds) == len(JUDGING_SEEDS) // 2
        assert {(seed - 1) // SEEDS_PER_POLICY for seed in seeds} == {
            (seed - 1) // SEEDS_PER_POLICY for seed in JUDGING_SEEDS
        }

    def test_only_what_belongs_to_the_level_differs(self) -> None:
        from benchmarks.stability_methods import METHODS

        of_level = {"importance_sampling_level", "loss_type", "clip_range_scaling"}
        for setting, methods in SETTINGS.items():
            settings = [{"method": Method(), **METHODS[name].settings} for name in methods.values()]
            differing = {key for one in settings for key in one if len({repr(each.get(key)) for each in settings}) > 1}
            assert differing - {"turn_ratio"} == of_level - ({"loss_type"} if setting == OF_TOKENS else set())

    def test_settings_differ_in_the_target_kl(self) -> None:
        from benchmarks.stability_methods import METHODS

        for level, name in SETTINGS["ratios alone"].items():
            added = METHODS[SETTINGS["with a target KL"][level]].settings.items() - METHODS[name].settings.items()
            said = {"importance_sampling_level": level, "method": Method()}.items()
            assert dict(added - said) == {"target_kl": 0.005}
