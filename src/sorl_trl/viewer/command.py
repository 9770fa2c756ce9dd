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
from sorl_trl.viewer.page import render_page

LIMIT = 1000
"""By default. Ours: as many dumped trajectories of 1,000 tokens are 33 MB, which a browser opens in seconds."""


def write_page(run: Path, output: Path, limit: int = LIMIT) -> tuple[int, int]:
    """Write the page of a run, in place of what was there before; how many trajectories it shows, and of how many.

    Args:
        run: The folder of an evaluation or of a training run.
        output: The file to write; its folder must be there.
        limit: At most so many trajectories, the first of each dataset or step, and of each as many.

    Raises:
        FileNotFoundError: `run` holds no trajectories.
        ValueError: `run` holds no trajectory yet.
    """
    source = open_run(run)
    total = sum(source.sizes.values())
    share = max(1, limit // max(1, len(source.sizes))) if total > limit else total
    entries = [entry for name in source.sizes for entry in islice(source.read(name), share)][:limit]
    if not entries:
        raise ValueError(f"{run} holds no trajectory yet: come back when a batch is finished")
    notes = list(source.notes)
    if len(entries) < total:
        notes.append(f"{total - len(entries):,} of {total:,} trajectories are left out: --limit is {limit:,}.")
    page = render_page(f"Trajectories of {run.resolve().name}", source.kind, entries, notes)
    write_whole(output, page.encode("utf-8", "replace"))
    return len(entries), total


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
        shown, total = write_page(**vars(arguments))
    print(f"{shown:,} of {total:,} trajectories: {arguments.output}")
