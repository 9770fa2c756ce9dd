from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from sorl_trl.diagnostics.rollout_picture import LEAST_WIDTH, bars, draw_rollouts, rows_height, summary
from sorl_trl.diagnostics.rollout_times import RolloutTimes, load_rollout_times

SPANS = [
    (0, "prefill", 0.0, 1.0),
    (0, "decode", 1.0, 3.0),
    (0, "search", 3.0, 5.0),
    (1, "decode", 0.0, 2.0),
    (0, "decode", 6.0, 8.0),
]
"""Row 1 is through after 2 seconds, row 0 after 8, of which it was idle for one."""


def times(**changed: Any) -> RolloutTimes:
    fields: dict[str, Any] = {
        "rows": 2,
        "seconds": 8.0,
        "seconds_generating": 6.0,
        "seconds_searching": 2.0,
        "sampled_tokens": 12,
        "spans": SPANS,
        "waits": [],
        "ended_s": [8.0, 2.0],
    }
    return RolloutTimes(**{**fields, **changed})


class TestRolloutTimes:
    def test_shares_are_of_the_time_until_a_trajectory_ended(self) -> None:
        assert times().shares() == pytest.approx({"prefill": 0.1, "decode": 0.6, "search": 0.2, "idle": 0.1})

    def test_no_row_decodes_while_the_rollout_stands_still(self) -> None:
        """First half a second of both rows; then two of row 0, which decodes in half a second of them."""
        waiting = times(waits=[(1.5, 2.0), (4.5, 6.5)])
        assert waiting.seconds_waiting == 2.5
        assert waiting.shares() == pytest.approx({"prefill": 0.1, "decode": 0.45, "search": 0.2, "idle": 0.25})

    def test_a_rollout_without_rows_has_no_shares(self) -> None:
        assert set(times(rows=0, spans=[], ended_s=[]).shares().values()) == {0.0}

    def test_read_as_written(self, tmp_path: Path) -> None:
        written = times(waits=[(5.0, 6.0)])
        written.write(tmp_path / "times.json")
        assert load_rollout_times(tmp_path / "times.json") == written

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"ended_s": [1.0]}, "ended_s has 1 entries for 2 rows"),
            ({"spans": [(2, "decode", 0.0, 1.0)]}, "row 2 in phase 'decode': rows are 0 to 1"),
            ({"spans": [(0, "dream", 0.0, 1.0)]}, "phase 'dream'"),
        ],
    )
    def test_what_cannot_be_is_refused(self, changed: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            times(**changed)

    @pytest.mark.parametrize("content", ["", "[]", "{}", '{"spans": [[0]]}', '{"spans": [], "unknown": 1}'])
    def test_another_file_is_named(self, tmp_path: Path, content: str) -> None:
        path = tmp_path / "times.json"
        path.write_text(content)
        with pytest.raises(ValueError, match=r"times\.json is not what training writes there"):
            load_rollout_times(path)


class TestDrawRollouts:
    def test_bars(self) -> None:
        assert bars(times(), "decode", 8.0) == ([(1.0, 2.0), (0.0, 2.0), (6.0, 2.0)], [0, 1, 0])
        assert bars(times(), "idle", 8.0) == ([(0.0, 8.0), (0.0, 2.0)], [0, 1])
        assert bars(times(), "ended", 10.0) == ([(8.0, 2.0), (2.0, 8.0)], [0, 1])
        assert bars(times(waits=[(1.0, 3.0)]), "wait", 8.0) == ([(1.0, 2.0)], [0.5])

    def test_a_prefill_is_wide_enough_to_be_seen(self) -> None:
        short = times(spans=[(0, "prefill", 1.0, 1.001), (0, "search", 2.0, 2.001)])
        assert bars(short, "prefill", 8.0)[0] == [(1.0, 8.0 * LEAST_WIDTH)]
        assert bars(short, "search", 8.0)[0] == [pytest.approx((2.0, 0.001))]

    def test_summary(self) -> None:
        assert summary(times(waits=[(5.0, 6.0)])) == (
            "the rollout: 75% generating, 25% searching, 12% standing still for a reply  ·  "
            "its rows: 10% prefill, 60% decode, 20% search, 10% idle"
        )

    def test_more_rows_are_higher_and_never_too_high(self) -> None:
        heights = [rows_height(rows) for rows in (1, 2, 8, 16, 64, 128, 512)]
        assert heights == sorted(heights)
        assert heights[0] >= 0.8
        assert heights[-2] < 6

    def test_one_below_the_other_on_one_axis(self, monkeypatch: pytest.MonkeyPatch) -> None:
        saved: list[Figure] = []
        monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: saved.append(figure))
        draw_rollouts({"a$1$": times(), "b": times(seconds=16.0)})
        (figure,) = saved
        assert [axis.get_title(loc="left") for axis in figure.axes] == ["a$1$: 2 rows, 8 s", "b: 2 rows, 16 s"]
        assert [axis.get_xlim() for axis in figure.axes] == [(0, 16), (0, 16)]
        assert [len(axis.patches) for axis in figure.axes] == [len(SPANS) + 2 + 2] * 2
        assert [text.get_text() for text in figure.legends[0].get_texts()][:3] == ["prefill", "decode", "search"]

    def test_no_rollout_is_refused(self) -> None:
        with pytest.raises(ValueError, match="must hold at least one"):
            draw_rollouts({})
