"""The rollout benchmark: its workload is the same every time, and its figures are what they are said to be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from benchmarks.rollout import empty_result, grid, is_measured, span
from benchmarks.rollout_engines import outside
from benchmarks.rollout_table import check_targets, format_result
from benchmarks.rollout_world import OBSERVATION, PROMPT, Cell, Script, ScriptedSearch, query, row_and_turn

from sorl_trl.command_line import UserMistake
from sorl_trl.search.backend import is_thread_safe

CELL = Cell(16, (3, 9), 20.0)


class TestScript:
    def test_searches_overlap_as_those_of_a_server_would(self) -> None:
        assert is_thread_safe(ScriptedSearch(Script(CELL)))

    def test_the_same_every_time(self) -> None:
        one, other = Script(CELL), Script(CELL)
        assert (one.prompts, one.turns, one.observations) == (other.prompts, other.turns, other.observations)
        assert np.array_equal(one.seconds, other.seconds)

    def test_only_the_searches_depend_on_their_latency(self) -> None:
        fast, slow = Script(CELL), Script(Cell(16, (3, 9), 40.0))
        assert (fast.prompts, fast.turns, fast.observations) == (slow.prompts, slow.turns, slow.observations)
        assert np.allclose(2 * fast.seconds, slow.seconds)

    def test_is_as_described(self) -> None:
        script = Script(CELL)
        assert script.prompts[0] == script.prompts[7] != script.prompts[8]
        assert all(PROMPT[0] <= len(prompt) <= PROMPT[1] for prompt in script.prompts)
        assert {len(turns) for turns in script.turns} == {3, 4}
        assert all(3 <= length <= 9 for turns in script.turns for length in turns)
        read = [observation for row in script.observations for observation in row]
        assert all(OBSERVATION[0] <= len(observation) <= OBSERVATION[1] for observation in read)

    def test_what_is_needed(self) -> None:
        """Two rows and turns of 2 tokens: of each turn, one token takes a step, the other comes with the prefill."""
        script = Script(Cell(2, (2, 2), 0.0))
        turns = sum(map(len, script.turns))
        read = sum(len(observation) for row in script.observations for observation in row)
        assert script.needed_row_steps == turns
        assert script.needed_tokens == 2 * len(script.prompts[0]) + read + turns - 2

    def test_latencies_have_the_mean_that_is_said(self) -> None:
        seconds = Script(Cell(2000, (2, 2), 500.0)).seconds
        assert seconds.mean() == pytest.approx(0.5, rel=0.05)
        assert np.quantile(seconds, 0.99) > 1.5

    def test_search_finds_the_observation_of_the_turn(self) -> None:
        script = Script(Cell(2, (2, 2), 0.0))
        search = ScriptedSearch(script)
        (found,), (other,) = search.search_batch([query(0, 0), query(1, 1)], 1)
        assert len(found.text.split()) == len(script.observations[0][0]) - 2
        assert len(other.text.split()) == len(script.observations[1][1]) - 2
        assert len(search.intervals) == 1
        assert row_and_turn(query(12, 3)) == (12, 3)


def test_seconds_outside_of_others() -> None:
    assert outside([(0, 4), (3, 6)], [(1, 2), (5, 9)]) == 4
    assert outside([], [(1, 2)]) == 0


def test_a_span_of_tokens() -> None:
    assert span("10-150") == (10, 150)
    for text in ("10", "1-5", "9-3", "a-b", "-5"):
        with pytest.raises(UserMistake, match="such as 10-150"):
            span(text)


def row(engine: str, cell: Cell, **measured: float) -> dict[str, Any]:
    low, high = cell.turn_tokens
    figures = {"cpu_seconds": 8.0, "wall_seconds": 12.0, "waiting_seconds": 1.0, "peak_memory_mb": 10.0}
    figures |= {"prefilled_over_needed": 1.0, "row_steps_over_needed": 1.0, **measured}
    named = {"rows": cell.rows, "turn_tokens": f"{low}-{high}", "search_ms": cell.search_ms}
    return {"engine": engine, **named, "hidden_size": cell.hidden_size, "layers": cell.layers, **figures}


def result(*rows: dict[str, Any]) -> dict[str, Any]:
    return {**empty_result(), "rows": list(rows)}


class TestTargets:
    hard, easy = Cell(64, (10, 150), 500.0), Cell(16, (10, 150), 0.0)

    def met(self, *rows: dict[str, Any]) -> dict[str, bool]:
        return {f"{what}: {measured}": met for what, measured, met in check_targets(result(*rows))}

    def test_ratios_at_the_hard_cell_and_the_worst_of_all(self) -> None:
        rows = [
            row("trl_loop", self.hard, wall_seconds=71.0),
            row("lockstep", self.hard, cpu_seconds=32.0),
            row("slots_event", self.hard),
            row("lockstep", self.easy, cpu_seconds=4.0),
            row("slots_event", self.easy, prefilled_over_needed=1.01),
        ]
        name = "64 rows, turns of 10-150, 500 ms, 64 × 2"
        assert self.met(*rows) == {
            f"`slots_event`: 4 × less processor time than `lockstep`, 64 rows, 0.5 s ({name}): 4.0 ×": True,
            f"`slots_event`: 6 × less time than `trl_loop`, 64 rows, 0.5 s ({name}): 5.9 ×": False,
            "`slots_…`: prefilled over needed, at most 1.0: at most 1.010": False,
            "`slots_…`: no row-step on a row that has ended: at most 1.000": True,
            f"`slots_event`: never more time than `lockstep`: 1.00 × at the worst ({name})": True,
            "`slots_event`: never more processor time than `lockstep`: 0.50 × at the worst "
            "(16 rows, turns of 10-150, 0 ms, 64 × 2)": False,
        }

    def test_nothing_is_said_of_what_was_not_measured(self) -> None:
        assert self.met(row("lockstep", self.hard)) == {}

    def test_the_table_has_a_line_per_cell_and_a_column_per_engine(self) -> None:
        rows = [row("lockstep", self.hard), row("slots_event", self.hard, cpu_seconds=2.5), row("lockstep", self.easy)]
        text = format_result(result(*rows))
        assert "| 10-150 | 64 | 500 ms | 64 × 2 | 8.0 | 2.5 |" in text
        assert "| 10-150 | 16 | 0 ms | 64 × 2 | 8.0 |  |" in text

    def test_other_values_of_rejoin_after_have_a_table_of_their_own(self) -> None:
        tried = [{**row("slots_event", self.hard, cpu_seconds=2.0), "rejoin_after": 16}]
        text = format_result({**result(row("slots_event", self.hard)), "rejoin_after": tried})
        assert "| 500 ms | 64 × 2 | 16 | 2.0 | 12.0 | 1.0 |" in text
        assert "rejoin_after" not in format_result(result(row("slots_event", self.hard)))

    def test_an_engine_that_cannot_run_here_is_said(self) -> None:
        reason = {"left_out": {"vllm_colocate": "vLLM is not installed"}}
        text = format_result({**result(row("lockstep", self.easy)), **reason})
        assert "`vllm_colocate` is left out: vLLM is not installed." in text
        elsewhere = format_result({**result(row("vllm_colocate", self.easy)), **reason})
        assert "left out" not in elsewhere

    def test_a_cell_that_was_measured_is_known(self) -> None:
        rows = [row("lockstep", cell) for cell in grid([16], ["10-150"], [0.0])]
        (cell,) = grid([16], ["10-150"], [0.0])
        assert is_measured(rows, "lockstep", cell)
        assert not is_measured(rows, "slots_event", cell)
        assert not is_measured(rows, "lockstep", Cell(16, (10, 150), 50.0, cell.hidden_size, cell.layers))
