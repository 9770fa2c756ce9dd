"""Trajectories to show, and a page read as a browser reads it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sorl_trl.evaluation.run import Batch, RunFolder
from sorl_trl.records.evaluated import FOLDER, read_evaluated, write_evaluated
from sorl_trl.records.trained import TrainedTrajectory
from sorl_trl.records.view import Entry, evaluation_entry
from tests.unit.evaluation.trajectories import answered, evaluated, question


def stored(row: dict[str, Any]) -> dict[str, Any]:
    """A row as it is read back."""
    with TemporaryDirectory() as run:
        write_evaluated(Path(run) / FOLDER / "nq/000000.parquet", [row])
        (read,) = read_evaluated(run, "nq")
    return read


def shown(row: dict[str, Any]) -> Entry:
    """The entry of what was written."""
    return evaluation_entry(stored(row))


ENTRY = shown(evaluated(question("Ada"), answered("Ada", searches=1)))
TRAINED = TrainedTrajectory(
    step=10,
    generated_at_step=9,
    prompt="Q: who ?",
    question="who ?",
    golden_answers=("Ada",),
    reward=0.5,
    answer="Ada",
    stop_reason="answered",
    tokens=("<search>", " who", " </search>", " [Ada]", "<answer> ", "Ada", "</answer>"),
    turn_ids=(0, 0, 0, -1, 1, 1, 1),
    token_ratios=(1.0, 1.1, 0.5, 1.0, 1.0, 2.0, 1.0),
    ratios=(0.8, 0.8, 0.8, 9.0, 1.22, 1.22, 1.22),
    advantages=(-1.0, -1.0, -1.0, 0.0, 0.25, 0.25, 0.25),
    clipped=("inside", "outside", "clipped", "none", "inside", "inside", "inside"),
    actions=("search", "answer"),
    turn_rewards=(None, None),
    roles=("tool", ""),
    agents=("", ""),
)


def write_evaluation(run: Path, *rows: dict[str, Any]) -> None:
    """One batch per data set; the run is not finished."""
    folder = RunFolder(run)
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    folder.claim({"datasets": dict.fromkeys(datasets, "hash")})
    for name in datasets:
        batch = [row for row in rows if row["dataset"] == name]
        write_evaluated(folder.shard(Batch(name, 0, ())), batch)


class Parsed(HTMLParser):
    """Tags with their attributes, and the text from each up to the next tag."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._is_open = False
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self.texts.append("")
        self._is_open = True

    def handle_endtag(self, tag: str) -> None:
        self._is_open = False

    def handle_data(self, data: str) -> None:
        if self._is_open:
            self.texts[-1] += data

    def all(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(each[1], text) for each, text in zip(self.tags, self.texts, strict=True) if each[0] == tag]


def content(page: Parsed) -> dict[str, Any]:
    [text] = [text for attributes, text in page.all("script") if attributes.get("id") == "data"]
    assert "<" not in text and text.isascii(), "what a browser makes of `<!--` in a script, this parser does not know"
    return json.loads(text)
