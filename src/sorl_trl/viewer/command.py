"""Writes the trajectories of a run as one HTML page: `sorl view run/ -o page.html`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from sorl_trl.command_line import Parser, at_least, mistakes
from sorl_trl.files import write_whole
from sorl_trl.viewer.data import open_run
from sorl_trl.viewer.page import render_page

ABOUT = """\
Writes the trajectories of a training run or of an evaluation as one HTML page, to filter and to read. The page needs
no server and no network. If a run has both, RUN shows training and RUN/evaluation the evaluation.

example: sorl view runs/quickstart/policy -o page.html
"""
LIMIT = 1000
"""Default of `--limit`, our choice: 1,000 trajectories of 1,000 tokens take 33 MB, which browsers open in seconds."""


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
