"""The trajectories of a run as one HTML page: `sorl view run/ -o page.html`.

`run` is the `--output` of evaluate.py, finished or not, or the `output_dir` of a training run that dumps trajectories.
The page needs no server and no network. `--help` lists the arguments; its keys are listed by `?`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from sorl_trl.command_line import Parser, at_least, mistakes
from sorl_trl.files import write_whole
from sorl_trl.viewer.data import open_run
from sorl_trl.viewer.page import Page, render_page

LIMIT = 1000
"""By default. Ours: as many dumped trajectories of 1,000 tokens are 33 MB, which a browser opens in seconds."""


def write_page(run: Path, output: Path, limit: int = LIMIT) -> Page:
    """Write the page of a run, in place of what was there before.

    Args:
        run: The folder of an evaluation or of a training run.
        output: The file to write; its folder must be there.
        limit: At most so many trajectories, the first of each dataset or step, and of each as many.

    Raises:
        FileNotFoundError: `run` holds no trajectories.
        ValueError: `run` holds no trajectory yet.
    """
    source = open_run(run)
    total = sum(group.size for group in source.groups)
    share = max(1, limit // max(1, len(source.groups))) if total > limit else total
    entries = [entry for group in source.groups for entry in islice(group.read(), share)][:limit]
    if not entries:
        raise ValueError(f"{run} holds no trajectory yet: come back when a batch is finished")
    notes = list(source.notes)
    if len(entries) < total:
        notes.append(f"{total - len(entries):,} of {total:,} trajectories are left out: --limit is {limit:,}.")
    page = Page(f"Trajectories of {run.resolve().name}", source.kind, entries, total, notes)
    write_whole(output, render_page(page).encode("utf-8", "replace"))
    return page


def main(words: Sequence[str] | None = None) -> None:
    parser = Parser(
        prog="sorl view",
        description="The trajectories of an evaluation or of a training run as one HTML page, to filter and to read.",
    )
    parser.add_argument("run", type=Path, help="`--output` of evaluate.py, or `output_dir` of training with dumps")
    where, page = "the page (default: %(default)s)", Path("trajectories.html")
    parser.add_argument("-o", "--output", type=Path, default=page, metavar="FILE", help=where)
    limit = "at most so many trajectories, of each dataset or step as many (default: %(default)s)"
    parser.add_argument("--limit", type=at_least(1), default=LIMIT, metavar="N", help=limit)
    arguments = parser.parse_args(words)
    with mistakes():
        made = write_page(**vars(arguments))
    print(f"{len(made.entries):,} of {made.total:,} trajectories: {arguments.output}")
