"""The page in a real browser: what is shown, what filters and keys do, and that nothing is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from sorl_trl.qa import Question
from sorl_trl.records.view import EVALUATION, TRAINING, Entry, render_page, training_entry
from sorl_trl.types import Action, ActionKind, Observation, Passage, StopReason, Trajectory, Turn
from tests.unit.evaluation.trajectories import TWO_AGENTS, answered, ended, evaluated, question
from tests.unit.records.entries import TRAINED, Parsed, shown

EXECUTABLE = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(EXECUTABLE is None, reason="needs Chromium")]


def in_browser(folder: Path, html: str, fragment: str = "") -> str:
    """What the document has become when its scripts have run; they have complained of nothing."""
    page = folder / "page.html"
    page.write_text(html, "utf-8")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    flags += ["--virtual-time-budget=2000", "--dump-dom"]
    command = [str(EXECUTABLE), *flags, f"--user-data-dir={folder / 'profile'}", f"{page.as_uri()}#{fragment}"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, check=True)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    return done.stdout


def text(document: str) -> str:
    """Of its trajectory, and of the list with its filters."""
    return unescape(re.sub("<[^>]*>", "", document[document.index("<aside") : document.index("<noscript")]))


def found_by(folder: Path, entries: Sequence[Entry], script: str) -> Any:
    """What a script that joins those of the page puts into `found`."""
    html = re.sub("<meta http-equiv[^>]*>", "", render_page("Mine", EVALUATION, entries))
    script = f"(async () => {{ const found = []; {script}; document.title = JSON.stringify(found); }})()"
    [(_, title)] = Parsed(in_browser(folder, html.replace("</body>", f"<script>{script}</script></body>"))).all(
        "title"
    )
    return json.loads(title)


def test_what_is_shown_of_an_evaluation(tmp_path: Path) -> None:
    search = Turn((1, 2), "<think>Who?</think> <search> the <b> \u202eend </search>", Action(ActionKind.SEARCH, "the"))
    passages = (
        Passage("p1", "Lovelace", "By ADA, lovelace.", 2.5),
        Passage("p2", "<img src=x onerror=alert(1)>", "n\x00"),
    )
    seen = Observation((3,), "\n<information>Doc 1</information>\n", passages, truncated=True, neutralized=3)
    answer = Turn((4,), "<answer> the Ada Lovelace </answer>", Action(ActionKind.ANSWER, "the Ada Lovelace"))
    user = Observation((5,), "And then?", role="user")
    asked = Question("q1", "who\u200b ?", ("Ada Lovelace", "US"), {"hops": 2})
    row = evaluated(asked, Trajectory((0,), (search, seen, search, user, answer), StopReason.ANSWERED))
    document = in_browser(tmp_path, render_page("Mine", EVALUATION, [shown(row)], ["3 are left out."]))
    for part in (
        *("3 are left out.", "1 of 1 trajectories", "who\u200b ?", "✓ right stopped: answered", "hops2"),
        *(
            "exact match1",
            "Turn 1search2 tokens",
            "the <b> \u202eend",
            "Environment1 tokentruncated3 neutralized",
            "User1 token",
        ),
        *("1. Lovelacescore 2.5gold", "2. <img src=x onerror=alert(1)>", "<information>Doc 1</information>"),
    ):
        assert part in text(document)
    assert "<mark>ADA, lovelace</mark>" in document
    assert "<img" not in document


def test_what_is_shown_of_training(tmp_path: Path) -> None:
    entries = [training_entry(replace(TRAINED, ratios=(1.0,) * 7), "step-10/1"), training_entry(TRAINED, "step-10/2")]
    document = in_browser(tmp_path, render_page("Mine", TRAINING, entries), "step-10/2")
    for part in ("reward above 0", "[Ada]"):
        assert part in text(document)
    # The scale ends near 1.25, of which 0.8 is the other end.
    assert re.findall('class="token ([^"]*)"', document) == ["below-4"] * 3 + ["above-4"] * 3


def test_before_the_first_update_the_legend_shows_no_range(tmp_path: Path) -> None:
    entry = training_entry(replace(TRAINED, ratios=(1.0,) * 7), "step-1/1")
    document = in_browser(tmp_path, render_page("Mine", TRAINING, [entry]), "step-1/1")
    assert "no movement yet" in text(document) and "≥" not in text(document)
    assert re.findall('class="token ([^"]*)"', document) == ["middle"] * 6


def test_agents_are_named_and_contexts_begin_where_they_alternate(tmp_path: Path) -> None:
    entry = shown(evaluated(question("Ada"), TWO_AGENTS))
    document = text(in_browser(tmp_path, render_page("Mine", EVALUATION, [entry])))
    headings = re.findall(r"Context \d|Turn \d[a-z]+(?=message)|Read again|User|Environment", document)
    assert headings == [
        *("Turn 1planner", "Context 1", "Read again", "User", "Turn 2searcher"),
        *("Context 2", "Read again", "Turn 3searcher", "Context 1", "Environment", "Turn 4searcher"),
        *("Context 0", "User", "Turn 5planner"),
    ]


def test_filters_order_and_keys(tmp_path: Path) -> None:
    gold = question("Ada")
    rows = [
        evaluated(gold, answered("Ada", searches=2)),
        evaluated(gold, answered("Bob", searches=1)),
        evaluated(gold, ended(StopReason.TURN_LIMIT)),
        evaluated(gold, ended(StopReason.SEARCH_UNAVAILABLE), dataset="musique"),
        evaluated(gold, answered("ada"), dataset="musique"),
    ]
    entries = [replace(shown(row), key=f"{row['dataset']}/{i}") for i, row in enumerate(rows)]
    script = """
        const choose = (name, value) => {
          byId(name).value = value;
          byId(name).dispatchEvent(new Event("input", { bubbles: true }));
          found.push(listed.map((entry) => entry.key.at(-1)).join(""));
        };
        const press = async (key) => {
          document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
          await new Promise((done) => setTimeout(done, 10)); // the address changes first
          found.push(current.key.at(-1));
        };
        choose("verdict", "right"); choose("group", "musique"); choose("verdict", ""); choose("group", "");
        choose("text", "bob"); choose("text", "");
        for (const key of ["j", "j", "k", "k", "k"]) await press(key)
    """
    expected = ["04", "4", "34", "01234", "1", "01234", "1", "2", "1", "0", "0"]
    assert found_by(tmp_path, entries, script) == expected
