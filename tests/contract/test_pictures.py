"""The pictures of the documentation are what `docs/pictures.py` draws of the results that lie in the repository."""

from __future__ import annotations

import runpy
from collections.abc import Callable

import pytest

from tests.documentation import ROOT

DRAWN = runpy.run_path(str(ROOT / "docs" / "pictures.py"))
PICTURES: dict[str, Callable[[], tuple[int, list[str]]]] = DRAWN["PICTURES"]


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_what_the_results_say(name: str) -> None:
    drawn = DRAWN["svg"](*PICTURES[name]())
    assert (DRAWN["FOLDER"] / f"{name}.svg").read_text() == drawn, "`python docs/pictures.py` draws them anew"
