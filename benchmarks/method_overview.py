"""One table of all methods to choose from: what each costs, where it helps and hurts, and what its source reports."""

from __future__ import annotations

import statistics
from collections.abc import Collection

from benchmarks.method_claims import METHOD_PAGES, MethodPage
from benchmarks.method_measured import BASELINE, OURS, Measured
from benchmarks.method_rates import own_cell
from benchmarks.method_settings import Method
from benchmarks.method_switches import switches_section

FEWEST = 5
"""Pairs from which a regime is said to be helped or hurt: of fewer, an interval says too little."""
COLUMNS = (
    *("method", "time, of GRPO's", "costs besides", "above GRPO in", "below GRPO in"),
    *("above our defaults in", "below our defaults in", "at its own learning rate, less our defaults", "as reported"),
)
HEAD = """# Methods, to choose from

A line per row of the [stability benchmark](stability.md), grouped by the pages of
[docs/paper_index.md](../../docs/paper_index.md). Made from its archive by `python -m benchmarks.method_pages`.

- **Time, of GRPO's**: CPU time of a rollout and its updates, in reuse · in hunts (`python -m
  benchmarks.method_cost`). Where that was not measured, "≈" is the wall time of a whole run over GRPO's of the same
  seed, regime and harness; the median over pairs, and how many. Those runs shared their machine with others, and
  took what their policies wrote: 0.8 to 1.2 says nothing. "–": no such pair.
- **Above** and **below**: regimes in which the final sampled EM differs, paired by seed within one harness, with an
  interval that excludes 0, from {fewest} pairs on, with the mean difference. "none": compared, and no interval
  excludes 0. "–": not compared. Where TRL's GRPO has no run of a harness, GRPO in our trainer, which computes the
  same, stands in for it.
- **At its own learning rate, less our defaults**: the mean difference between the row at a learning rate that was
  chosen for it and our defaults at the common one, in the regimes where that was run.
- **As reported**: the source's claim, for other models and tasks. [P] read in the paper, [C] in a public
  implementation, [A] in the abstract alone, [2nd] second-hand. None is reproduced here.

**How not to read it.** Policies of about 140,000 parameters, in worlds of ours. But for one column, learning rates are
common to all rows of a regime and high; where they are searched for, GRPO does not collapse either.
With this many comparisons, one in twenty excludes 0 by chance, and bootstrap intervals over five seeds are too narrow.
Our defaults were settled with these seeds in view: that others end below them is no test of ours.
"""


def time_ratio(name: str, measured: Measured) -> str:
    """What was measured for that, or the median over GRPO's pairs of runs, and their number."""
    found = [costs[name] for costs in measured.costs.values() if name in costs]
    return " · ".join(f"{cost:.2f}" for cost in found) if found else seconds_ratio(name, measured)


def seconds_ratio(name: str, measured: Measured) -> str:
    """The median over GRPO's pairs, and their number."""
    ratios = []
    for regime, table in measured.tables.items():
        base = {(run.harness, run.seed): run.record["seconds"] for run in measured.all_of(BASELINE, regime)}
        runs = [run for run in table.get(name, []) if (run.harness, run.seed) in base and not run.error]
        ratios += [run.record["seconds"] / base[run.harness, run.seed] for run in runs]
    return f"≈ {statistics.median(ratios):.1f} ({len(ratios)})" if ratios and name != BASELINE else "–"


def contrasts(name: str, baseline: str, measured: Measured) -> list[str]:
    """In which regimes a row is above and in which below another: their titles and mean differences."""
    compared = False
    found: dict[int, list[str]] = {1: [], -1: []}
    for regime in measured.tables:
        pair = measured.difference(name, baseline, regime)
        if pair is None or len(pair["seeds"]) < FEWEST:
            continue
        compared = True
        low, high = pair["interval"]
        if low > 0 or high < 0:
            found[1 if low > 0 else -1].append(f"{measured.grid.regimes[regime].title} {pair['mean']:+.2f}")
    return ["; ".join(found[sign]) or ("none" if compared else "–") for sign in (1, -1)]


def extra_cost(method: Method) -> str:
    """What its rollouts cost that GRPO's do not, as its settings say."""
    settings = method.settings
    costs = {
        "a critic": method.family == "ppo",
        "one update per rollout": method.passes == "one",
        "twice as many passes as a trajectory can have turns": method.passes == "turns",
        f"at most {settings.get('group_refill')} batches more to generate": settings.get("group_refill"),
        "a pass over every state": settings.get("information_gain_coef"),
    }
    return ", ".join(text for text, is_so in costs.items() if is_so) or "–"


def overview_lines(name: str, page: MethodPage, measured: Measured, is_written: bool) -> list[list[str]]:
    """A page's lines: one per row, and one for a page without any."""
    grid, lines = measured.grid, []
    for row in [name for name in page.rows if name in grid.methods] or [""]:
        title = grid.methods[row].title if row else page.title
        cost = extra_cost(grid.methods[row]) if row else "–"
        cells = ["not measured", cost, *["–"] * 5]
        if any(row in table for table in measured.tables.values()):
            cells = [time_ratio(row, measured), cost]
            cells += [*contrasts(row, BASELINE, measured), *contrasts(row, OURS, measured), own_cell(row, measured)]
        lines.append([f"[{title}](../../docs/methods/{name}.md)" if is_written else title, *cells, page.short])
    return lines


def overview_page(measured: Measured, written: Collection[str]) -> str:
    """`methods.md`; `written` are the names of the pages that exist."""
    lines = [list(COLUMNS), ["---"] * len(COLUMNS)]
    for name, page in METHOD_PAGES.items():
        lines += overview_lines(name, page, measured, name in written)
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return "\n".join(filter(None, [HEAD.format(fewest=FEWEST), table, switches_section(measured)]))
