"""The trajectories of a run as one HTML page: `python -m sorl_trl.evaluation.view run/ -o page.html`.

`run` is the `--output` of evaluate.py, finished or not, or the `output_dir` of a training run that dumps trajectories.
The page needs no server and no network. `--help` lists the arguments; its keys are listed by `?`.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sorl_trl.diagnostics.runs import replace_file
from sorl_trl.evaluation.view_data import Entry, open_run
from sorl_trl.evaluation.view_page import Page, render_page

LIMIT = 5000
"""By default. Ours: a page of so many stays quick, at a few kilobytes each."""


def write_page(run: Path, output: Path, title: str | None = None, limit: int = LIMIT) -> Page:
    """Write the page of a run, in place of what was there before.

    Args:
        run: The folder of an evaluation or of a training run.
        output: The file to write; its folder must be there.
        title: The heading; by default it names the run.
        limit: At most so many trajectories, the first of each dataset or step, and of each about as many.

    Raises:
        FileNotFoundError: `run` holds no trajectories, or the folder of `output` is missing.
        ValueError: `run` holds no trajectory yet or those of both kinds, or `limit` is below 1.
        IsADirectoryError: `output` is a folder.
    """
    _check(output, limit)
    source = open_run(run)
    entries, totals = take_evenly(source.entries, limit)
    if not entries:
        raise ValueError(f"{run} holds no trajectory yet: come back when a batch is finished")
    page = Page(
        title=title or f"Trajectories of {run.resolve().name}",
        kind=source.kind,
        entries=entries,
        total=totals.total(),
        notes=[*source.notes, *_left_out(len(entries), totals.total())],
    )
    replace_file(output, render_page(page).encode("utf-8", "replace"))
    return page


def take_evenly(entries: Iterable[Entry], limit: int) -> tuple[list[Entry], Counter[str]]:
    """At most `limit` entries, in order, and how many each group had.

    The first of each group. Groups get equal shares; what a small one does not need goes to the larger ones.
    """
    first: defaultdict[str, list[Entry]] = defaultdict(list)
    totals: Counter[str] = Counter()
    for entry in entries:
        totals[entry.group] += 1
        if totals[entry.group] <= limit:
            first[entry.group].append(entry)
    shares = _shares(totals, limit)
    return [entry for group, found in first.items() for entry in found[: shares[group]]], totals


def _shares(totals: Mapping[str, int], limit: int) -> dict[str, int]:
    shares: dict[str, int] = {}
    for served, group in enumerate(sorted(totals, key=lambda group: totals[group])):
        left = limit - sum(shares.values())
        shares[group] = min(totals[group], left // (len(totals) - served))
    return shares


def _left_out(shown: int, total: int) -> list[str]:
    if shown == total:
        return []
    left_out = f"{total - shown:,} of {total:,} trajectories are left out (--limit)"
    return [f"{left_out}: of each dataset or step the first are here."]


def _check(output: Path, limit: int) -> None:
    if limit < 1:
        raise ValueError(f"--limit must be at least 1, got {limit}")
    if output.is_dir():
        raise IsADirectoryError(f"--output must be a file to write, got the folder {output}")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"--output must be in a folder that is there, got {output}: no folder {output.parent}")


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sorl_trl.evaluation.view",
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
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    """The command line; what a user can put right ends it with a sentence instead of a traceback."""
    arguments = parse_arguments(words)
    try:
        page = write_page(arguments.run, arguments.output, arguments.title, arguments.limit)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    print(f"{len(page.entries):,} of {page.total:,} trajectories: {arguments.output}")


if __name__ == "__main__":
    main()
