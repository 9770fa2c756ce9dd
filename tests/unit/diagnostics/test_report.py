from __future__ import annotations

import base64
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from sorl_trl.command_line import UserMistake
from sorl_trl.diagnostics.plots import COLORS
from sorl_trl.diagnostics.report import (
    FIGURES,
    figures_table,
    findings,
    first_to_last,
    last_and_best,
    main,
    median_and_largest,
    summary_of,
    write_report,
)
from sorl_trl.diagnostics.report_page import Figure, Page, Row, render_page
from sorl_trl.diagnostics.rollout_times import RolloutTimes
from sorl_trl.diagnostics.runs import Run, Series

RISING = Series(tuple(range(1, 21)), (*map(float, range(19)), 0.0))
"""20 values, so that averages cover 5: from 2 at step 5 over 16 at step 19 to 13.2."""


def run(**metrics: list[float]) -> Run:
    """Entries 1, 2, … with these values; two underscores in a name stand for a slash."""
    length = max(len(values) for values in metrics.values())
    names = {name: name.replace("__", "/") for name in metrics}
    return Run(
        "a", [{"step": i + 1, **{names[k]: v[i] for k, v in metrics.items() if i < len(v)}} for i in range(length)]
    )


class TestFigures:
    def test_last_and_best(self) -> None:
        assert last_and_best(RISING) == Figure("13.200 at the end", "best 16.000 at step 19")
        assert last_and_best(Series((3, 4), (2.0, 1.0))) == Figure("1.000 at the end", "best 2.000 at step 3")

    def test_median_and_largest_are_of_what_was_logged(self) -> None:
        assert median_and_largest(RISING) == Figure("median 8.5", "largest 18 at step 19")

    def test_first_to_last(self) -> None:
        assert first_to_last(RISING) == Figure("2 → 13.2")

    def test_a_column_per_run_and_a_row_per_metric_that_one_has(self) -> None:
        history = [{"step": 1200, "reward": 0.5, "eval_reward": 0.75}]
        rows = figures_table([Run("a", history, max_steps=2400), Run("b", [{"step": 3, "grad_norm": 2.0}])])
        assert rows == [
            Row("Optimizer steps", "step", (Figure("1,200", "of 2,400"), Figure("3"))),
            Row("Reward", "reward", (Figure("0.500 at the end", "best 0.500 at step 1,200"), None)),
            Row("Reward, evaluation", "eval_reward", (Figure("0.750 at the end", "best 0.750 at step 1,200"), None)),
            Row("Gradient norm", "grad_norm", (None, Figure("median 2", "largest 2 at step 3"))),
        ]

    def test_what_the_clip_does_to_sequences(self) -> None:
        history = [{"step": step, "clip_fraction/sequence": share} for step, share in ((1, 0.0), (2, 0.5), (3, 0.25))]
        shown = figures_table([Run("a", history)])[1]
        assert shown == Row(
            "Clip fraction of sequences", "clip_fraction/sequence", (Figure("median 0.25", "largest 0.5 at step 2"),)
        )

    def test_every_figure_has_a_title(self) -> None:
        titles = [row.title for row in figures_table([Run("a", [{"step": 1, **dict.fromkeys(FIGURES, 1.0)}])])]
        assert len(set(titles)) == len(FIGURES) + 1


class TestSummary:
    def test_a_line_per_run(self) -> None:
        collapses = [0.6] * 10 + [0.05] * 12
        history = [{"step": step, "reward": reward} for step, reward in enumerate(collapses, 1)]
        runs = [
            Run("a", history, max_steps=40, configuration={"settings.json": {"beta": 0.1}}),
            Run("b", [{"step": 3, "grad_norm": 1.0}]),
        ]
        header, first, second = summary_of(runs)
        assert header == ["optimizer steps", "reward at the end", "best reward", "first alarm", "beta"]
        assert first == ["22 of 40", "0.050", "0.600, step 5", first[3], "0.1"]
        assert re.fullmatch(r"reward_fall, step 1\d", first[3])
        assert second == ["3", "–", "–", "none", "–"]

    @pytest.mark.parametrize("count", [1, 2, 12, 20])
    def test_any_number_of_runs(self, count: int, tmp_path: Path) -> None:
        """Of different lengths, some without a reward, none of some metrics: a line, a column and a name for each."""
        runs = []
        for place in range(count):
            metrics: dict[str, Any] = {"entropy": 1.0} if place % 5 == 4 else {"reward": 0.1 * place, "grad_norm": 1.0}
            runs.append(Run(f"run{place}x", [{"step": s, **metrics} for s in range(1, 3 + place % 3)]))
        page = write_report(runs, tmp_path).read_text(encoding="utf-8")
        rows = re.findall(r"<tr><th scope='row'><svg.*?</svg>(\w+)</th>", page)
        assert rows == [run.name for run in runs]
        assert page.count("<th scope='col'><svg") == count
        swatches = re.findall(r"<th scope='col'>(<svg.*?</svg>)", page)
        assert len(set(swatches)) == count


class TestFindings:
    def test_nothing_in_a_healthy_run(self) -> None:
        healthy = {"reward": [0.1, 0.5, 0.45], "grad_norm": [1.0, 2.9, 2.0, 0.1], "entropy": [1.0, 0.5, 0.2]}
        healthy |= {"kl_to_old": [0.1, 0.2, 0.29, 0.2], "critic__explained_variance": [-0.1, 0.1, 0.2]}
        assert findings(run(**healthy, rollout__invalid_actions_per_trajectory=[0.5, 0.1])) == []
        assert findings(Run("a", [])) == []

    @pytest.mark.parametrize(
        ("metrics", "sentence"),
        [
            (
                {"reward": [0.1, 0.5, 0.2]},
                "The reward fell from a best average of 0.5 at step 2 to 0.2 at the end, 40% of it.",
            ),
            ({"reward": [0.5, -1.0]}, "The reward fell from a best average of 0.5 at step 1 to -1 at the end."),
            (
                {"rollout__searches_per_trajectory": [2.0, 1.0]},
                "Searches per trajectory fell from a best average of 2 at step 1 to 1 at the end, 50% of it.",
            ),
            (
                {"kl_to_old": [0.1, 0.1, 0.1, 0.4]},
                "The KL to the old policy rose to 0.4 on average at step 4, from at most 0.1 early on.",
            ),
            (
                {"grad_norm": [1.0, 1.0, 4.0, 1.0]},
                "The gradient norm rose to 4 on average at step 3, from at most 1 early on.",
            ),
            ({"grad_norm": [1.0, 0.0]}, "The gradient is 0 at the end: nothing is learned any more."),
            ({"entropy": [1.0, 2.5]}, "The entropy went from 1 to 2.5 nats per token."),
            ({"entropy": [1.0, 0.05]}, "The entropy went from 1 to 0.05 nats per token."),
            (
                {"rollout__invalid_actions_per_trajectory": [0.0, 0.25]},
                "At the end a trajectory has 0.25 invalid actions on average.",
            ),
            (
                {"rollout__masked_share": [0.0, 0.5, 0.0]},
                "The search engine was down: at step 2, for 50% of the trajectories.",
            ),
            (
                {"critic__explained_variance": [0.5, -0.2]},
                "The critic explains nothing at the end: its explained variance is -0.2.",
            ),
            (
                {"grad_norm": [1.0, math.nan, math.inf, 1.0]},
                "grad_norm was NaN or infinite in 2 log entries, first at step 2.",
            ),
        ],
    )
    def test_one_sentence_each(self, metrics: dict[str, list[float]], sentence: str) -> None:
        assert findings(run(**metrics)) == [sentence]

    def test_a_single_bad_batch_is_not_a_fall(self) -> None:
        assert findings(run(reward=[0.5] * 39 + [0.1])) == []
        assert len(findings(run(reward=[0.5] * 30 + [0.1] * 10))) == 1

    def test_a_negative_reward_has_no_share(self) -> None:
        assert findings(run(reward=[-1.0, -2.0])) == []

    def test_a_run_that_is_not_through(self) -> None:
        half = Run("a", [{"step": 1000}], max_steps=2000)
        assert findings(half) == ["It is under way or ended early: 1,000 of 2,000 optimizer steps are logged."]
        assert findings(Run("a", [{"step": 2000}], max_steps=2000)) == []


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
        runs = [Run(text, [], configuration={text: {text: text, "n": 3, "unset": None, "list": [text]}})]
        rows = [Row(text, text, (Figure(text, text),))]
        return render_page(Page(runs, {text: 0}, [[text], [text]], b"png", rows, [[text]], [text]))

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
        runs = [Run("a", []), Run("b", [])]
        rows = [Row("Reward", "reward", (Figure("0.5"), None))]
        page = render_page(Page(runs, {"a": 0, "b": 1}, [[], [], []], b"", rows, [[], []], []))
        assert "<td>0.5</td><td class='faint'>–</td>" in page
        assert "Nothing by the rules below: a, b." in page
        assert "class='card'" not in page
        assert "Configuration" not in page

    def test_a_card_only_where_there_is_something_to_say(self) -> None:
        runs = [Run("a", []), Run("b", []), Run("c", [])]
        places = {"a": 0, "b": 1, "c": 2}
        page = render_page(Page(runs, places, [[], [], [], []], b"", [], [[], ["It fell."], []], []))
        assert page.count("class='card'") == 1
        assert "Nothing by the rules below: a, c." in page

    def test_runs_of_one_line_have_its_swatch(self) -> None:
        runs = [Run("a", []), Run("b", []), Run("c", [])]
        page = render_page(
            Page(runs, {"a": 0, "b": 0, "c": 8}, [["x"], ["1"], ["2"], ["3"]], b"", [], [[], [], []], [])
        )
        drawn = re.findall(r"stroke='(#\w+)' stroke-width='4' stroke-dasharray='([^']+)'/></svg>(\w)</th><td>", page)
        assert drawn == [(COLORS[0], "none", "a"), (COLORS[0], "none", "b"), (COLORS[0], "8 3", "c")]

    def test_settings_that_are_not_set_are_left_out(self) -> None:
        text = Tags(self.page("plain")).text
        assert "n3" in text
        assert "unset" not in text


class TestWriteReport:
    def test_from_log_histories(self, tmp_path: Path) -> None:
        histories = {"one": [{"step": 1, "reward": 0.5}], "two": [{"step": 1, "reward": 0.25}]}
        path = write_report(histories, tmp_path / "new" / "folder")
        assert path == tmp_path / "new" / "folder" / "report.html"
        assert {file.name for file in path.parent.iterdir()} == {"report.html", "report.png"}
        embedded = re.search(r"base64,([^']+)'", path.read_text(encoding="utf-8"))
        assert embedded
        assert base64.b64decode(embedded[1]) == (path.parent / "report.png").read_bytes()

    def test_a_rollout_is_a_picture_more(self, tmp_path: Path) -> None:
        times = RolloutTimes(1, 2.0, 1.0, 1.0, 4, [(0, "decode", 0.0, 1.0)], [(1.0, 2.0)], [2.0])
        path = write_report([Run("a", [{"step": 1, "reward": 0.5}], rollout=times)], tmp_path)
        assert {file.name for file in tmp_path.iterdir()} == {"report.html", "report.png", "rollouts.png"}
        page = path.read_text(encoding="utf-8")
        embedded = [base64.b64decode(picture) for picture in re.findall(r"base64,([^']+)'", page)]
        assert embedded == [(tmp_path / name).read_bytes() for name in ("report.png", "rollouts.png")]
        assert "The last rollout" in page

    def test_the_same_runs_make_the_same_page(self, tmp_path: Path) -> None:
        runs = [run(reward=[0.5, 0.25])]
        assert write_report(runs, tmp_path / "a").read_bytes() == write_report(runs, tmp_path / "b").read_bytes()

    @pytest.mark.parametrize("runs", [{}, []])
    def test_no_run_is_refused(self, tmp_path: Path, runs: Any) -> None:
        with pytest.raises(ValueError, match="`runs` is empty"):
            write_report(runs, tmp_path)

    def test_nothing_to_draw_writes_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="has a metric of"):
            write_report({"one": [{"step": 1}]}, tmp_path / "report")
        assert not (tmp_path / "report").exists()


class TestCommandLine:
    def test_two_runs(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for name in ("so_grpo", "grpo"):
            (tmp_path / name).mkdir()
            state = {"global_step": 1, "max_steps": 2, "log_history": [{"step": 1, "reward": 0.5}]}
            (tmp_path / name / "trainer_state.json").write_text(json.dumps(state))
        output = tmp_path / "out"
        main([str(tmp_path / "so_grpo"), str(tmp_path / "grpo"), "--output", str(output)])
        assert str(output / "report.html") in capsys.readouterr().out
        assert "so_grpo, grpo" in (output / "report.html").read_text(encoding="utf-8")

    def test_seeds_by_name(self, tmp_path: Path) -> None:
        for name in ("gspo_1", "gspo_2"):
            (tmp_path / name).mkdir()
            state = {"global_step": 1, "log_history": [{"step": 1, "reward": 0.5}]}
            (tmp_path / name / "trainer_state.json").write_text(json.dumps(state))
        swatches = []
        for option in ([], ["--seeds_by_name"]):
            main([str(tmp_path / "gspo_1"), str(tmp_path / "gspo_2"), "--output", str(tmp_path / "out"), *option])
            page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
            swatches.append(len(set(re.findall(r"<th scope='row'>(<svg.*?</svg>)", page))))
        assert swatches == [2, 1]

    def test_an_error_is_a_sentence(self, tmp_path: Path) -> None:
        with pytest.raises(UserMistake, match=rf"^{tmp_path} holds no trainer_state\.json"):
            main([str(tmp_path), "--output", str(tmp_path / "out")])
        assert not (tmp_path / "out").exists()

    def test_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["--help"])
        assert ended.value.code == 0
        assert "--output DIR" in capsys.readouterr().out
