from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from matplotlib.figure import Figure

from sorl_trl.diagnostics.plots import (
    COLORS,
    draw_runs,
    visible_panels,
)
from sorl_trl.diagnostics.runs import Run

PNG = b"\x89PNG\r\n"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Figure]]:
    """The figures that are saved, to look at their lines instead of at pixels; the pixels take too long to draw."""
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: (saved.append(figure), file.write(PNG)))
    yield saved


def run(name: str, steps: int = 40, **metrics: Any) -> Run:
    """Each metric is a function of the step."""
    metrics = metrics or {"reward": float}
    return Run(name, [{"step": s, **{key: f(s) for key, f in metrics.items()}} for s in range(1, steps + 1)])


def titles(runs: list[Run]) -> set[str]:
    return {panel.title for panel in visible_panels(runs)}


class TestVisiblePanels:
    def test_those_that_some_run_has(self) -> None:
        ours = Run("ours", [{"step": 1, "reward": 1.0, "clip_fraction/token": 0.0, "kl_to_old": None}])
        trls = Run("trl's", [{"step": 1, "reward": 1.0, "clip_ratio/region_mean": 0.0}])
        assert titles([ours]) == {"Reward", "Clip fraction of tokens"}
        assert titles([ours, trls]) == {"Reward", "Clip fraction of tokens", "Stopped by the clip"}

    def test_no_metric_at_all_is_refused(self) -> None:
        with pytest.raises(ValueError, match="'a' has a metric of reward"):
            visible_panels([Run("a", [{"step": 1, "loss": 0.5}])])


class TestDrawRuns:
    def test_a_colour_per_run_and_a_common_legend(self, figures: list[Figure]) -> None:
        names = ["_first", "$second$", "third"]  # a legend would leave out one, and typeset the other
        draw_runs([run(name) for name in names])
        [axis] = figures[0].axes
        assert [text.get_text().strip() for text in figures[0].legends[0].get_texts()] == names
        assert not any(text.get_parse_math() for text in figures[0].legends[0].get_texts())
        drawn = [line.get_color() for line in axis.lines if len(line.get_xdata())]
        assert drawn == [color for color in COLORS[:3] for _ in range(2)]

    def test_evaluations_are_dots(self, figures: list[Figure]) -> None:
        history = [{"step": 1, "reward": 0.5, "kl_to_old": 0.1}, {"step": 1, "eval_reward": 0.7, "eval_kl_to_old": 0}]
        draw_runs([Run("a", history)])
        reward, kl = figures[0].axes
        assert [list(line.get_ydata()) for line in reward.lines] == [[0.5], [0.7]]
        assert [list(line.get_ydata()) for line in kl.lines] == [[0.1], []]

    def test_log_scale_over_two_decades_where_it_makes_sense(self, figures: list[Figure]) -> None:
        draw_runs([run("a", 5, reward=lambda s: 10.0**s, grad_norm=lambda s: 10.0**s, entropy=float)])
        scales = {axis.get_title(loc="left"): axis.get_yscale() for axis in figures[0].axes}
        assert scales == {"Reward": "linear", "Gradient norm": "log", "Entropy": "linear"}
        assert "grad_norm, log scale" in {text.get_text() for axis in figures[0].axes for text in axis.texts}
        draw_runs([run("a", 5, grad_norm=float)])
        assert figures[1].axes[0].get_yscale() == "linear"

    def test_without_matplotlib_it_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ImportError, match=r"pip install 'sorl-trl\[plot\]'"):
            draw_runs([run("a")])
