"""The command that writes the page, and the page as a browser reads it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sorl_trl.command_line import sorl_command
from sorl_trl.records.trained import write_trained
from sorl_trl.records.view import EVALUATION, TRAINING, Entry, main, render_page, write_page
from tests.unit.evaluation.trajectories import answered, evaluated, question
from tests.unit.records.entries import ENTRY, TRAINED, Parsed, content, write_evaluation


def shown(page: Path) -> Any:
    return content(Parsed(page.read_text("utf-8")))


def test_each_step_has_as_many_and_what_is_left_out_is_noted(tmp_path: Path) -> None:
    for step in (10, 20):
        write_trained(tmp_path, step, 0, [replace(TRAINED, step=step)] * 5)
    assert write_page(tmp_path, tmp_path / "page.html", limit=4)[:2] == (4, 10)
    found = shown(tmp_path / "page.html")
    assert [entry["key"] for entry in found["trajectories"]] == ["step-10/1", "step-10/2", "step-20/1", "step-20/2"]
    assert found["notes"] == ["6 of 10 trajectories are left out: --limit is 4."]
    assert write_page(tmp_path, tmp_path / "page.html", limit=1)[:2] == (1, 10)
    assert write_page(tmp_path, tmp_path / "page.html", limit=10)[:2] == (10, 10)


def test_a_note_on_training_names_the_evaluation_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").touch()
    write_trained(tmp_path, 10, 0, [TRAINED])
    write_evaluation(tmp_path / "evaluation", evaluated(question("Ada"), answered("Ada")))
    main([str(tmp_path), "-o", str(tmp_path / "page.html")])
    hint = sorl_command("view", str(tmp_path / "evaluation"))
    assert hint in capsys.readouterr().out
    assert hint in shown(tmp_path / "page.html")["notes"][0]
    assert shown(tmp_path / "page.html")["kind"] == TRAINING


HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!-- <script> --> ]]> &lt; &amp;",
    "\u2028\u2029\x00\x1b[2J\u202e half a character: \ud83d",
    "$policy ${data} {title}",
]


def rendered(*entries: Entry, notes: list[str] | None = None) -> Parsed:
    return Parsed(render_page("Run", EVALUATION, entries, notes or []))


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_stays_data(text: str) -> None:
    passage = {"id": text, "title": text, "text": text, "score": None}
    marks = {"passages": [passage], "truncated": False, "neutralized": 0}
    segments = ({"kind": "observation", "text": text, "token_count": 1, **marks},)
    entry = replace(
        ENTRY, key=text, question=text, golden_answers=(text,), answer=text, prompt=text, segments=segments
    )
    page, harmless = rendered(entry, notes=[text]), rendered(ENTRY)
    assert page.tags[0] == harmless.tags[0]
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in harmless.tags]
    assert content(page)["notes"] == [text]
    [found] = content(page)["trajectories"]
    assert [found[name] for name in ("key", "question", "answer", "prompt")] == [text] * 4
    assert found["segments"][0]["passages"] == [passage]


def test_a_title_is_escaped_and_nothing_is_loaded() -> None:
    title = "</title><script>alert(1)</script> $data"
    html = render_page(title, EVALUATION, [ENTRY])
    assert [text for _, text in Parsed(html).all("title")] == [title]
    assert len(Parsed(html).all("script")) == len(rendered(ENTRY).all("script"))
    assert not re.search(r"https?:|@import|url\(", html)
    assert not [a for _, a in Parsed(html).tags if {"src", "srcset", "href", "style", "onclick"} & set(a)]
