"""The trajectories of a run as one HTML page: `python -m sorl_trl.viewer run/ -o page.html`.

`run` is the `--output` of evaluate.py, finished or not, or the `output_dir` of a training run that dumps trajectories.
The page needs no server and no network. `--help` lists the arguments; its keys are listed by `?`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from sorl_trl.command_line import Parser, mistakes
from sorl_trl.files import write_whole
from sorl_trl.viewer.data import Entry, Group, open_run
from sorl_trl.viewer.page import Page, embed, render_page

LIMIT = 5000
"""By default. Ours: a list of so many stays quick to filter and to step through."""
MEGABYTES = 50
"""By default. Ours: 1,500 dumped trajectories of 1,000 tokens, at 33 kB each, which a browser opens in seconds."""


def write_page(
    run: Path, output: Path, title: str | None = None, limit: int = LIMIT, megabytes: int = MEGABYTES
) -> Page:
    """Write the page of a run, in place of what was there before.

    Args:
        run: The folder of an evaluation or of a training run.
        output: The file to write; its folder must be there.
        title: The heading; by default it names the run.
        limit: At most so many trajectories, the first of each dataset or step, and of each about as many.
        megabytes: At most so much of them, likewise. One is kept whatever its size.

    Raises:
        FileNotFoundError: `run` holds no trajectories, or the folder of `output` is missing.
        ValueError: `run` holds no trajectory yet or those of both kinds, or `limit` or `megabytes` is below 1.
        IsADirectoryError: `output` is a folder.
    """
    _check(output, limit, megabytes)
    source = open_run(run)
    entries = take_evenly(source.groups, limit, megabytes * 1_000_000)
    if not entries:
        raise ValueError(f"{run} holds no trajectory yet: come back when a batch is finished")
    page = Page(
        title=title or f"Trajectories of {run.resolve().name}",
        kind=source.kind,
        entries=entries,
        total=sum(group.size for group in source.groups),
        notes=[*source.notes, *_left_out(entries, source.groups, limit)],
    )
    write_whole(output, render_page(page).encode("utf-8", "replace"))
    return page


def take_evenly(groups: Sequence[Group], limit: int, max_bytes: int) -> list[Entry]:
    """The first entries of each group, in order: at most `limit`, and at most `max_bytes` of the page.

    Groups get equal shares; what a small one does not need goes to the larger ones, and of bytes to the later ones.
    What is not kept is not read, but for one entry of each group. The very first entry is kept whatever its size.
    """
    shares = _shares({group.name: group.size for group in groups}, limit)
    kept: list[Entry] = []
    for served, group in enumerate(groups):
        share = max_bytes // (len(groups) - served)
        for entry in islice(group.read(), shares[group.name]):
            size = len(embed(vars(entry)))
            if kept and size > share:
                break
            kept.append(entry)
            share, max_bytes = share - size, max_bytes - size
    return kept


def _shares(sizes: Mapping[str, int], limit: int) -> dict[str, int]:
    shares: dict[str, int] = {}
    for served, group in enumerate(sorted(sizes, key=lambda group: sizes[group])):
        left = limit - sum(shares.values())
        shares[group] = min(sizes[group], left // (len(sizes) - served))
    return shares


def _left_out(entries: Sequence[Entry], groups: Sequence[Group], limit: int) -> list[str]:
    total = sum(group.size for group in groups)
    if len(entries) == total:
        return []
    bound = "--limit" if len(entries) == limit else "--megabytes"
    without = len({group.name for group in groups if group.size} - {entry.group for entry in entries})
    return [
        f"{total - len(entries):,} of {total:,} trajectories are left out ({bound}): of each dataset or step the "
        f"first are here{f', of {without:,} none' if without else ''}."
    ]


def _check(output: Path, limit: int, megabytes: int) -> None:
    for name, value in (("limit", limit), ("megabytes", megabytes)):
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    if output.is_dir():
        raise IsADirectoryError(f"--output must be a file to write, got the folder {output}")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"--output must be in a folder that is there, got {output}: no folder {output.parent}")


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog="sorl view",
        description="The trajectories of an evaluation or of a training run as one HTML page, to filter and to read.",
    )
    parser.add_argument("run", type=Path, help="`--output` of evaluate.py, or `output_dir` of training with dumps")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("trajectories.html"),
        metavar="FILE",
        help="the page (default: %(default)s)",
    )
    parser.add_argument("--title", help="its heading (default: the name of the run)")
    parser.add_argument(
        "--limit",
        type=int,
        default=LIMIT,
        metavar="N",
        help="at most so many trajectories, of each dataset or step about as many (default: %(default)s)",
    )
    parser.add_argument(
        "--megabytes",
        type=int,
        default=MEGABYTES,
        metavar="MB",
        help="at most so much of them, of each dataset or step about as much (default: %(default)s)",
    )
    arguments: argparse.Namespace = parser.parse_args(words)
    return arguments


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(words)
    with mistakes():
        page = write_page(**vars(arguments))
    print(f"{len(page.entries):,} of {page.total:,} trajectories: {arguments.output}")
