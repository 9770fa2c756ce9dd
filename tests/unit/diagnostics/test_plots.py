from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from matplotlib.figure import Figure

from sorl_trl.diagnostics.plots import (
    draw_runs,
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


class TestDrawRuns:
    def test_without_matplotlib_it_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ImportError, match=r"pip install 'sorl-trl\[plot\]'"):
            draw_runs([run("a")])
