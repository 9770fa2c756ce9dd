"""The page of a report: what it says of runs, and that their texts stay texts."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from sorl_trl.command_line import UserMistake
from sorl_trl.diagnostics.report import figures_of, main, summary_of, write_report
from sorl_trl.diagnostics.report_page import Row, render_page
from sorl_trl.diagnostics.runs import Run


class TestFigures:
    def test_a_column_per_run_and_a_row_per_metric_that_one_has(self) -> None:
        history = [{"step": 1200, "reward": 0.5, "eval_reward": 0.75}]
        rows = figures_of([Run("a", history), Run("b", [{"step": 3, "grad_norm": 2.0}])])
        assert rows == [
            Row("Reward\nreward", ["0.5\n0.5 to 0.5", ""]),
            Row("Reward\neval_reward", ["0.75\n0.75 to 0.75", ""]),
            Row("Gradient norm\ngrad_norm", ["", "2\n2 to 2"]),
        ]

    def test_the_end_is_an_average_and_extremes_are_single_entries(self) -> None:
        values = [*map(float, range(19)), 0.0]  # of 20, averages cover 5
        (row,) = figures_of([Run("a", [{"step": step, "reward": value} for step, value in enumerate(values, 1)])])
        assert row.cells == ["13.2\n0 to 18"]


class TestSummary:
    def test_of_a_run_that_collapses_and_one_that_says_little(self) -> None:
        collapses = [0.6] * 10 + [0.05] * 12
        history = [{"step": step, "reward": reward} for step, reward in enumerate(collapses, 1)]
        steps, reward, alarms, beta = summary_of(
            [Run("a", history, 40, {"beta": 0.1}), Run("b", [{"step": 3, "grad_norm": 1.0}])]
        )
        assert steps.cells == ["22 of 40", "3"]
        assert reward.cells == ["0.050\nbest 0.600, step 5", ""]
        assert alarms.cells[0].startswith("reward_fall: ") and alarms.cells[1] == ""
        assert beta == Row("beta", ["0.1", "–"])


class Tags(HTMLParser):
    """What a page consists of, as a browser would see it."""

    VOID = ("meta", "img")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


class TestRenderPage:
    def page(self, text: str) -> str:
        rows = [Row(text, [f"{text}\n{text}"])]
        return render_page([Run(text, [], settings={text: text, "n": 3, "list": [text]})], rows, b"png", rows)

    @pytest.mark.parametrize("text", ["<script>alert(1)</script>", "' onload='alert(1)", '"><b>', "&lt;", "</style>"])
    def test_text_stays_text(self, text: str) -> None:
        tags, plain = Tags(self.page(text)), Tags(self.page("plain"))
        assert tags.names == plain.names
        assert [name for name, _ in tags.attributes] == [name for name, _ in plain.attributes]
        assert tags.text.count(text) >= 12  # wherever the page shows it

    def test_needs_no_other_file(self) -> None:
        page = self.page("plain")
        links = [value for name, value in Tags(page).attributes if name in ("src", "href")]
        assert links == ["data:image/png;base64," + base64.b64encode(b"png").decode()]
        assert "url(" not in page
        assert "@import" not in page

    def test_a_dash_for_what_a_run_does_not_have(self) -> None:
        page = render_page([Run("a", []), Run("b", [])], [], b"", [Row("Reward", ["0.5", ""])])
        assert "<td>0.5</td><td>–</td>" in page
        assert "Settings</h2>" not in page


class TestWriteReport:
    def test_a_page_and_a_picture(self, tmp_path: Path) -> None:
        runs = [Run("one", [{"step": 1, "reward": 0.5}]), Run("two", [{"step": 1, "reward": 0.25}])]
        path = write_report(runs, tmp_path / "new" / "folder")
        assert path == tmp_path / "new" / "folder" / "report.html"
        assert {file.name for file in path.parent.iterdir()} == {"report.html", "report.png"}
        page = path.read_text(encoding="utf-8")
        embedded = re.search(r"base64,([^']+)'", page)
        assert embedded
        assert base64.b64decode(embedded[1]) == (path.parent / "report.png").read_bytes()
        assert re.findall(r"<th scope='col'><svg.*?</svg>(\w+)</th>", page) == ["one", "two"] * 2

    def test_nothing_to_draw_writes_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="has a metric of"):
            write_report([Run("one", [{"step": 1}])], tmp_path / "report")
        assert not (tmp_path / "report").exists()


class TestCommandLine:
    def test_two_runs(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for name in ("so_grpo", "grpo"):
            (tmp_path / name).mkdir()
            state: Any = {"global_step": 1, "max_steps": 2, "log_history": [{"step": 1, "reward": 0.5}]}
            (tmp_path / name / "trainer_state.json").write_text(json.dumps(state))
        output = tmp_path / "out"
        main([str(tmp_path / "so_grpo"), str(tmp_path / "grpo"), "--output", str(output)])
        assert str(output / "report.html") in capsys.readouterr().out
        assert "so_grpo, grpo" in (output / "report.html").read_text(encoding="utf-8")

    def test_an_error_is_a_sentence(self, tmp_path: Path) -> None:
        with pytest.raises(UserMistake, match=rf"^{tmp_path} holds no trainer_state\.json"):
            main([str(tmp_path), "--output", str(tmp_path / "out")])
        assert not (tmp_path / "out").exists()
