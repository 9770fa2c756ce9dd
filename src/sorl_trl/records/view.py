"""The page of `sorl view RUN`: one HTML file with its style, its scripts and its data. It loads nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from itertools import islice
from pathlib import Path
from string import Template
from typing import Any

from sorl_trl.command_line import Parser, at_least, mistakes
from sorl_trl.files import write_whole
from sorl_trl.records.entries import Entry, open_run

ABOUT = """\
Writes the trajectories of a training run or of an evaluation as one HTML page, to filter and to read. The page needs
no server and no network. If a run has both, RUN shows training and RUN/evaluation the evaluation. Of a training run,
it also says what the rules of the collapse guard find in its log.

example: sorl view runs/quickstart/policy -o page.html
"""
LIMIT = 1000
"""Default of `--limit`, our choice: 1,000 trajectories of 1,000 tokens take 33 MB, which browsers open in seconds."""
STYLE = "view.css"
SCRIPTS = ("view_text.js", "view_trajectory.js", "view_list.js")


def main(words: Sequence[str]) -> None:
    usage = "sorl view RUN [-o FILE] [--limit N]"
    parser = Parser(prog="sorl view", usage=usage, description=ABOUT)
    kinds = "`output_dir` of training with `save_trajectories_steps`; or what `sorl evaluate` evaluated, or its output"
    parser.add_argument("run", type=Path, metavar="RUN", help=kinds)
    where, page = "the page (default: %(default)s)", Path("trajectories.html")
    parser.add_argument("-o", "--output", type=Path, default=page, metavar="FILE", help=where)
    limit = "at most so many trajectories, of each dataset or step as many (default: %(default)s)"
    parser.add_argument("--limit", type=at_least(1), default=LIMIT, metavar="N", help=limit)
    arguments = parser.parse_args(words)
    with mistakes():
        shown, total, notes = write_page(**vars(arguments))
    print("\n".join([f"{shown:,} of {total:,} trajectories: {arguments.output}", *notes]))


def write_page(run: Path, output: Path, limit: int = LIMIT) -> tuple[int, int, list[str]]:
    """Write the page of a run: at most `limit` trajectories, the first ones of each dataset or step in equal shares.

    Returns:
        How many trajectories the page shows, how many there are, and notes for the reader, a sentence each.

    Raises:
        FileNotFoundError: `run` is not a folder of trajectories.
        ValueError: `run` holds no trajectory yet, or `output` cannot be a file.
    """
    if not output.parent.is_dir() or output.is_dir():
        raise ValueError(f"`output` is {str(output)!r}, but must be a file in an existing folder")
    source = open_run(run)
    total = sum(source.sizes.values())
    share = max(1, limit // max(1, len(source.sizes))) if total > limit else total
    entries = [entry for name in source.sizes for entry in islice(source.read(name), share)][:limit]
    if not entries:
        raise ValueError(f"{run} holds no trajectory yet: try again when a batch is finished")
    notes = list(source.notes)
    if len(entries) < total:
        notes.append(f"{total - len(entries):,} of {total:,} trajectories are left out: --limit is {limit:,}.")
    page = render_page(f"Trajectories of {run.resolve().name}", source.kind, entries, notes)
    write_whole(output, page.encode("utf-8", "replace"))
    return len(entries), total, notes


def render_page(title: str, kind: str, entries: Sequence[Entry], notes: Sequence[str] = ()) -> str:
    """The whole HTML document, of the kind `EVALUATION` or `TRAINING`; the browser is told to fetch nothing."""
    style, *scripts = (_asset(name) for name in (STYLE, *SCRIPTS))
    # Each trajectory by itself, because `json` holds a separate text for every number that it is given.
    head = embed({"kind": kind, "notes": notes})
    trajectories = ",".join(embed(vars(entry)) for entry in entries)
    return Template(_asset("view.html")).substitute(
        title=escape(title),
        style=style,
        data=f'{head[:-1]},"trajectories":[{trajectories}]}}',
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def embed(content: Any) -> str:
    """JSON that no HTML parser can misread: without `<`, and in ASCII, so that any text fits, even half characters."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", r"\u003c")


def _asset(name: str) -> str:
    return files("sorl_trl.records").joinpath(f"assets/{name}").read_text(encoding="utf-8")
