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
from sorl_trl.records.trained import TrainedTrajectory
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
    """What can be read on it, but for the words that it explains."""
    document = re.sub('<details id="guide">.*?</details>', "", document, flags=re.DOTALL)
    return unescape(re.sub("<[^>]*>", "", document[document.index("<body") : document.index("<noscript")]))


SCRIPT = """
    const choose = (name, value) => {
      byId(name)[typeof value === "boolean" ? "checked" : "value"] = value;
      byId(name).dispatchEvent(new Event("input", { bubbles: true }));
    };
    const told = (selector) => [...document.querySelectorAll(selector)].map((node) => node.textContent);
    const cells = (row) => [...row.cells].map((cell) => cell.textContent).filter(Boolean);
    const rowsOf = (node) => [...node.querySelectorAll("tr")].map(cells);
    const keys = () => listed.map((entry) => entry.key.at(-1)).join("");
"""


def found_by(folder: Path, entries: Sequence[Entry], script: str, kind: str = EVALUATION) -> Any:
    """What a script that joins those of the page puts into `found`."""
    html = re.sub("<meta http-equiv[^>]*>", "", render_page("Mine", kind, entries))
    script = SCRIPT + script
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
        const filter = (name, value) => found.push((choose(name, value), keys()));
        const press = async (key) => {
          document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
          await new Promise((done) => setTimeout(done, 10)); // the address changes first
          found.push(current.key.at(-1));
        };
        filter("verdict", "right"); filter("part", "musique"); filter("verdict", ""); filter("part", "");
        filter("text", "bob"); filter("text", "");
        for (const key of ["j", "j", "k", "k", "k"]) await press(key)
    """
    expected = ["04", "4", "34", "01234", "1", "01234", "1", "2", "1", "0", "0"]
    assert found_by(tmp_path, entries, script) == expected


def trained_in(
    group: int, reward: float | None, advantage: float, tokens: int = 7, **fields: Any
) -> TrainedTrajectory:
    fields = {"prompt": f"Q {group}", "question": f"who {group} ?", "answer": None, **fields}
    lists = ("tokens", "turn_ids", "token_ratios", "ratios", "clipped")
    cut = {name: getattr(TRAINED, name)[:tokens] for name in lists}
    return replace(TRAINED, group=group, reward=reward, advantages=(advantage,) * tokens, **cut, **fields)


GROUPS = [
    training_entry(each, f"k/{i}")
    for i, each in enumerate(
        (
            trained_in(0, 1.0, 1.5, group_rewards=(1.0, 0.0, 0.0, None)),
            trained_in(1, 0.0, -0.5, tokens=3, group_rewards=(0.0, 0.0)),
            trained_in(0, 0.0, -0.75, tokens=6, group_rewards=(1.0, 0.0, 0.0, None), stop_reason="max_turns"),
            trained_in(1, 0.0, -0.5, tokens=5, group_rewards=(0.0, 0.0)),
            trained_in(1, 3.0, 0.5, generated_at_step=8, group_rewards=(3.0,)),
        )
    )
]
"""Of one rollout, half a group and a whole one; of another, one of a prompt that occurred before."""


def test_a_group_is_shown_with_its_mean_and_advantages(tmp_path: Path) -> None:
    script = """
        found.push(keys(), told("#list .head"), told("#list .group li small"), told("article .siblings a"));
        found.push(told("#list > li:not(.group) .question"));
        choose("verdict", "rewarded"); found.push(told("#list .head").length); choose("verdict", "");
        choose("by-group", false); found.push(keys(), told("#list .head").length);
    """
    ordered, heads, members, siblings, alone, *rest = found_by(tmp_path, GROUPS, script, TRAINING)
    assert ordered == "02134"
    assert ["mean reward 0.333" in heads[0], "std 0.577" in heads[0]] == [True, True]
    assert ["who 1 ?" in heads[1], "mean reward 0" in heads[1], len(heads)] == [True, True, 2]
    assert ["1.5" in members[0], "−0.75" in members[1], "−0.5" in members[2]] == [True] * 3
    assert siblings == ["11.5", "0−0.75"], "and no mark: a small reward may be worse than the others"
    assert alone == ["who 1 ?"]
    assert rest == [0, "01234", 0]


def test_the_samples_of_a_question_are_a_group(tmp_path: Path) -> None:
    given = [(question("Ada"), "Ada"), (question("Bob"), "Bob"), (question("Ada"), "Bob"), (question("Ada"), "Ada")]
    entries = [
        replace(shown({**evaluated(asked, answered(answer)), "question_id": asked.golden_answers[0]}), key=str(i))
        for i, (asked, answer) in enumerate(given)
    ]
    script = """
        found.push(keys(), told("#list .head"));
        choose("verdict", "wrong"); found.push(keys(), byId("summary").textContent);
    """
    ordered, heads, wrong, summary = found_by(tmp_path, entries, script)
    assert ordered == "0231"
    assert ["mean score 0.667" in head for head in heads] == [True]
    assert (wrong, "0 of 1 group with equal scores" in summary) == ("2", True)


def test_sorting(tmp_path: Path) -> None:
    script = """
        for (const grouped of [true, false]) {
          choose("by-group", grouped);
          for (const { label } of ORDERS) found.push((choose("order", label), keys()));
        }
    """
    entries = [replace(GROUPS[0], key="k/5", group="0/9", group_rewards=(), score=None), *GROUPS]
    assert found_by(tmp_path, entries, script, TRAINING) == [
        *("502134", "402135", "132045", "502431", "132054"),
        *("501234", "401235", "123045", "504231", "132504"),
    ]


def test_search_finds_and_marks_what_trajectories_hold(tmp_path: Path) -> None:
    gold, passage = question("Ada"), Passage("p", "Title (1)", "Hidden in a fold.")
    turn = Turn((1,), "<search> I wonder </search>", Action(ActionKind.SEARCH, "I wonder"))
    seen = Observation((2,), "read", (passage,))
    searched = Trajectory((0,), (turn, seen, turn), StopReason.MAX_TURNS)
    rows = [evaluated(gold, answered("Ada")), evaluated(gold, searched), evaluated(gold, TWO_AGENTS)]
    entries = [replace(shown(row), key=f"nq/{i}") for i, row in enumerate(rows)]
    script = """
        for (const words of ["WONDER </S", "e (1)", "hidden in", ".", "planner", "nowhere"]) {
          choose("text", words); found.push(keys());
        }
        choose("text", "hidden in");
        location.hash = address(listed[0]);
        await new Promise((done) => setTimeout(done, 10));
        found.push([...CSS.highlights.get("found")].map(String));
        found.push([...main.querySelectorAll("details[open]")].length);
        choose("text", "WONDER </S");
        found.push([...CSS.highlights.get("found")].map(String));
    """
    *searches, marked, opened, across = found_by(tmp_path, entries, script)
    assert searches == ["1", "1", "1", "1", "2", ""]
    assert (marked, opened) == (["Hidden in"], 1)
    assert across == ["wonder </s"] * 2


def test_the_header_counts_what_is_listed(tmp_path: Path) -> None:
    script = """
        const header = () => found.push(byId("summary").textContent, rowsOf(byId("distributions")));
        header(); choose("stop_reason", "max_turns"); header();
    """
    whole, bars, part, bars_of_part = found_by(tmp_path, GROUPS, script, TRAINING)
    for words in ("5 trajectories of 3 groups", "mean reward 0.8", "1 of 2 groups with equal rewards"):
        assert words in whole
    assert bars == [["0", "3"], ["1", "1"], ["3", "1"], ["1", "1"], ["2", "4"], ["answered", "4"], ["max turns", "1"]]
    assert "1 trajectory of 1 group" in part
    assert bars_of_part == [["0", "1"], ["2", "1"], ["max turns", "1"]]


def test_many_rewards_share_bars(tmp_path: Path) -> None:
    entries = [replace(GROUPS[0], key=f"k/{i}", score=i / 4) for i in range(13)]
    entries += [replace(GROUPS[0], key="k/13", score=None)]
    (bars,) = found_by(
        tmp_path, entries, 'found.push(rowsOf(document.querySelector("#distributions table")));', TRAINING
    )
    assert [bar[1] for bar in bars] == ["2", "2", "2", "2", "2", "3", "1"]
    assert [bars[0][0], bars[-2][0], bars[-1][0]] == ["0 to 0.5", "2.5 to 3", "none"]


def compacted(known: str) -> Entry:
    """An agent whose policy reads, writes a note, and goes on in a context that begins with what is `known`."""
    search, note, end = (
        Turn((i,), words, Action(ActionKind.MESSAGE, words), context=i // 2)
        for i, words in enumerate(("Search.", "It was Ada.", "Done."))
    )
    read, opening = (Observation((9,), words, role="user", context=i) for i, words in enumerate(("Found 14.", known)))
    return shown(evaluated(question("Ada"), Trajectory((0,), (search, read, note, opening, end), StopReason.ANSWERED)))


def test_agents_contexts_and_summaries_are_seen_in_the_list(tmp_path: Path) -> None:
    entries = [
        shown(evaluated(question("Ada"), TWO_AGENTS)),
        compacted("Known: It was Ada."),
        compacted("Search. Found 14. It was Ada. Go on."),
        compacted("Begin again."),
    ]
    script = """
        choose("by-group", false); found.push(told("#list small"));
        location.hash = address(entries[1]);
        await new Promise((done) => setTimeout(done, 10));
        found.push(told(".turn .badge"));
    """
    entries = [replace(entry, key=f"nq/{i}") for i, entry in enumerate(entries)]
    rows, badges = found_by(tmp_path, entries, script)
    assert ["planner, searcher" in rows[0], "3 contexts" in rows[0]] == [True, True]
    assert ["2 contexts" in row for row in rows] == [False, True, True, True]
    assert ["1 summary" in row for row in rows] == [False, True, False, False]
    assert badges == ["summary"]


def test_the_token_that_training_adds_is_told_from_what_the_policy_read(tmp_path: Path) -> None:
    ids = (0, 0, -1, -1, 1, 1, -1)
    fields = {"turn_ids": ids, "roles": ("tool", ""), "tokens": (*TRAINED.tokens[:6], "[EOS]")}
    entry = training_entry(replace(TRAINED, **fields), "k")
    unknown = training_entry(replace(TRAINED, turn_ids=(-1,) * 7), "k")
    for shown_entry, headings in (
        (entry, ["Environment", "End, added by the trainer"]),
        (unknown, ["Not trained on"]),
    ):
        document = text(in_browser(tmp_path, render_page("Mine", TRAINING, [shown_entry])))
        assert re.findall(r"Environment(?=\d)|End, added by the trainer|Not trained on(?=\d)", document) == headings
