from __future__ import annotations

import re
from dataclasses import replace

import pytest

from sorl_trl.viewer.data import EVALUATION, Entry
from sorl_trl.viewer.page import render_page
from tests.unit.viewer.entries import ENTRY, Parsed, content

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!-- <script> -->",
    "]]> &lt; &amp;",
    "\u2028\u2029\x00\x1b[2J\u202e",
    "half a character: \ud83d",
    "$policy ${data} {title}",
    "日本語 مرحبا 🎉",
    "x" * 1_000_000,
]


def rendered(*entries: Entry, title: str = "Run", kind: str = EVALUATION, notes: list[str] | None = None) -> Parsed:
    return Parsed(render_page(title, kind, entries, notes or []))


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


def test_a_title_is_escaped() -> None:
    title = "</title><script>alert(1)</script> $data"
    page = rendered(ENTRY, title=title)
    assert [text for _, text in page.all("title")] == [title]
    assert len(page.all("script")) == len(rendered(ENTRY).all("script"))


class TestPolicy:
    def test_nothing_is_loaded(self) -> None:
        html = render_page("Run", EVALUATION, [ENTRY])
        assert not re.search(r"https?:|@import|url\(", html)
        assert not [a for _, a in Parsed(html).tags if {"src", "srcset", "href", "style", "onclick"} & set(a)]
