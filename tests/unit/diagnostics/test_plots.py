from __future__ import annotations

import sys

import pytest

from sorl_trl.diagnostics.plots import draw_runs
from sorl_trl.diagnostics.runs import Run


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'sorl-trl\[plot\]'"):
        draw_runs([Run("a", [{"step": 1, "reward": 1.0}])])
