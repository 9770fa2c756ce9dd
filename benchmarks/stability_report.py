"""The stability benchmark's report: `stability.json`, `stability.md` and pictures, from the records of its runs."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.seed_statistics import RESAMPLES, bootstrap_interval, paired
from benchmarks.stability_figures import draw_regime, draw_summary
from benchmarks.stability_overview import overview_tables, worlds_text
from benchmarks.stability_statistics import (
    INFINITE,
    MARGIN,
    Grid,
    Record,
    Run,
    Table,
    choose,
    choosing_plan,
    choosing_scores,
    judged,
    mean_final,
    published_grid,
    read_runs,
)
from benchmarks.stability_texts import CHOOSING, HEADER, OVERVIEW

if TYPE_CHECKING:
    from benchmarks.method_settings import Method
    from benchmarks.stability_grid import Regime

Row = dict[str, Any]


def rows(records: Iterable[Record], grid: Grid | None = None) -> list[Row]:
    """The rows of `stability.json`: regime by method by kind of learning rate, where there are judging runs.

    A figure that no run has is `None`. `grid` is the published one unless given. Errors are those of `read_runs`.
    """
    grid = grid or published_grid()
    return make_rows(judged(read_runs(records, grid), grid), grid)


def make_rows(tables: Mapping[tuple[str, bool], Table], grid: Grid) -> list[Row]:
    """The rows of all tables, each beside its family's baseline at the same and at its own learning rate."""
    made = []
    for (regime, tuned), table in tables.items():
        for method, runs in table.items():
            baseline, rate = grid.methods[method].family, runs[0].cell[2]
            row = {"regime": regime, "method": method, "learning_rate": rate, "tuned": tuned, **summarize(runs)}
            row |= {name: runs[0].record[name] for name in ("world", "policy_parameters")}
            row |= {"same_runs_as_common": tuned and rate == grid.common(regime), "baseline": baseline}
            row["difference"] = None if method == baseline else paired(runs, table.get(baseline, []))
            row["difference_to_tuned_baseline"] = paired(runs, tables[regime, True].get(baseline, []))
            made.append(row)
    return made


def summarize(runs: Sequence[Run]) -> Row:
    """The figures of one cell."""

    def over(key: str, in_run: Callable[..., float], over_runs: Callable[..., float]) -> float | None:
        figures = [in_run(metric) for run in runs if (metric := run.metric(key))]
        return max(-INFINITE, min(over_runs(figures), INFINITE)) if figures else None

    sampled, greedy = ([run.final(score) for run in runs] for score in ("sampled_em", "greedy_em"))
    return {
        "seeds": [run.seed for run in runs],
        "harnesses": sorted({run.harness for run in runs}),
        "collapses": sum(run.collapsed for run in runs),
        "collapsed_seeds": [run.seed for run in runs if run.collapsed],
        "errors": {str(run.seed): run.error for run in runs if run.error},
        "sampled_em": statistics.fmean(sampled),
        "sampled_em_interval": bootstrap_interval(sampled),
        "sampled_em_by_seed": sampled,
        "greedy_em": statistics.fmean(greedy),
        "greedy_em_interval": bootstrap_interval(greedy),
        "greedy_em_by_seed": greedy,
        "best_sampled_em": statistics.fmean(run.best for run in runs),
        "clip_fraction": over("clip_fraction/token", statistics.fmean, statistics.fmean),
        "kl_median": over("kl_to_old median", statistics.median, statistics.median),
        "kl_max": over("kl_to_old max", max, max),
        "grad_norm_max": over("grad_norm max", max, max),
        "ratio_min": over("turns/ratio_min", min, min),
        "ratio_max": over("turns/ratio_max", max, max),
        "explained_variance": over("critic/explained_variance", statistics.fmean, statistics.fmean),
    }


def short(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2g}" if value < INFINITE else "∞"


def em(mean: float, interval: Sequence[float] | None, digits: str = ".3f") -> str:
    return f"{mean:{digits}}" + (f" [{interval[0]:{digits}}, {interval[1]:{digits}}]" if interval else "")


def difference(found: Row | None) -> str:
    return "–" if found is None else f"{em(found['mean'], found['interval'], '+.3f')}, p {found['p']:.3g}"


def harness_marks(harnesses: Iterable[int]) -> str:
    return "".join("¹²³⁴⁵⁶⁷⁸⁹"[harness - 1] for harness in sorted(harnesses))


def sampled_cell(row: Row) -> str:
    return em(row["sampled_em"], row["sampled_em_interval"]) + harness_marks(row["harnesses"])


def collapses(row: Row) -> str:
    died = f" ({len(row['errors'])} died)" if row["errors"] else ""
    return f"{row['collapses']}/{len(row['seeds'])}{died}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "final sampled EM": sampled_cell,
    "final greedy EM": lambda row: f"{row['greedy_em']:.3f}",
    "best sampled EM": lambda row: f"{row['best_sampled_em']:.3f}",
    "collapses": collapses,
    "clip fraction": lambda row: short(row["clip_fraction"]),
    "KL median / max": lambda row: f"{short(row['kl_median'])} / {short(row['kl_max'])}",
    "max gradient norm": lambda row: short(row["grad_norm_max"]),
    "turn ratio, smallest / largest": lambda row: f"{short(row['ratio_min'])} / {short(row['ratio_max'])}",
    "against GRPO or PPO": lambda row: difference(row["difference"]),
}
AT_COMMON = {"against GRPO or PPO, tuned": lambda row: difference(row["difference_to_tuned_baseline"])}
WHEN_TUNED = {"learning rate": lambda row: f"{row['learning_rate']:g}" + " = common" * row["same_runs_as_common"]}


def lines_of_table(names: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A Markdown table: the first column to the left, the others to the right."""
    lines = [names, ["---"] + ["---:"] * (len(names) - 1), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def result_table(of_table: Sequence[Row], grid: Grid) -> str:
    """The table of one regime at one kind of learning rate, and who died."""
    columns = WHEN_TUNED | COLUMNS if of_table[0]["tuned"] else COLUMNS | AT_COMMON
    body = [[grid.methods[row["method"]].title, *(cell(row) for cell in columns.values())] for row in of_table]
    died = [
        f"{grid.methods[row['method']].title}, seed {seed}: {error.splitlines()[0]}"
        for row in of_table
        for seed, error in row["errors"].items()
    ]
    note = f"\nDied, so counted as collapsed with an EM of 0: {'; '.join(died)}.\n"
    return lines_of_table(["method", *columns], body) + (note if died else "")


def overview(made: Sequence[Row], grid: Grid) -> list[str]:
    """Methods by regimes at the common learning rate, a table per world."""
    return overview_tables(
        made,
        grid,
        lambda row: f"{sampled_cell(row)} · {collapses(row)}",
        lines_of_table,
    )


def choosing_table(runs: Sequence[Run], grid: Grid, regime: str) -> str:
    """Mean final sampled EM and collapses over the choosing seeds, at each learning rate."""
    chosen = choose(runs, grid)
    scores = {method: choosing_scores(runs, grid, regime, method) for method in grid.methods}
    rates = sorted({rate for tried in scores.values() for rate, of_rate in tried.items() if of_rate})
    body = []
    for method, tried in scores.items():
        best = chosen.get((regime, method))
        edge = "†" if tried and best in (min(tried), max(tried)) else ""
        texts = {
            rate: f"{mean_final(of_rate):.3f} · {sum(run.collapsed for run in of_rate)}/{len(of_rate)}"
            for rate, of_rate in tried.items()
            if of_rate
        }
        cells = [f"**{texts[rate]}**{edge}" if rate == best else texts.get(rate, "") for rate in rates]
        body += [[grid.methods[method].title, *cells]] if texts else []
    return lines_of_table(["method", *(f"{rate:g}" for rate in rates)], body) if body else ""


def missing(runs: Sequence[Run], grid: Grid) -> list[str]:
    """What of the plan has not run, a line per regime and purpose; own learning rates count once they are chosen."""
    there, chosen = {(run.cell, run.seed) for run in runs}, choose(runs, grid)
    lines = []
    for regime, settings in grid.regimes.items():
        common = grid.common(regime)
        methods = grid.methods_in(regime)
        own = {method: {chosen.get((regime, method), common)} - {common} for method in grid.tuned}
        for purpose, plans in (
            ("at the common learning rate", {m: list(product([common], grid.judging_seeds)) for m in methods}),
            ("choosing learning rates", {name: choosing_plan(runs, grid, regime, name) for name in grid.tuned}),
            ("at each method's own learning rate", {m: list(product(own[m], grid.judging_seeds)) for m in own}),
        ):
            lacking = []
            for method, plan in plans.items():
                if count := sum(((regime, method, rate), seed) not in there for rate, seed in plan):
                    lacking.append(f"{grid.methods[method].title} ({count} of {len(plan)} runs)")
            lines += [f"- {settings.title}, {purpose}: {', '.join(lacking)}."] if lacking else []
    return lines


def sections_of(reading: str, grid: Grid) -> dict[str, str]:
    """Regime to its paragraphs in the reading; "" to what stands before the first regime.

    Raises:
        ValueError: a heading is not a regime's name.
    """
    general, *rest = re.split(r"^## (.+)$", reading, flags=re.MULTILINE)
    sections = dict(zip(map(str.strip, rest[::2]), map(str.strip, rest[1::2]), strict=True))
    if unknown := sections.keys() - grid.regimes.keys():
        raise ValueError(f"The reading has a heading {min(unknown)!r}; allowed are {list(grid.regimes)}.")
    return {"": general.strip(), **sections}


def settings_of(part: Regime | Method) -> str:
    """Title, description and all other fields, as an entry of a list."""
    untold = ("title", "description", "tuned", "drawn")
    fields = {
        name: value for name, value in vars(part).items() if name not in untold and value is not False and value != ""
    }
    if "world" in fields:
        fields["world"] = fields["world"].name
    if not fields.get("methods", True):
        del fields["methods"]  # all of them
    settings = fields.pop("settings", {})
    named = ", ".join(f"`{name}={value!r}`" for name, value in {**fields, **settings}.items())
    return f"- **{part.title}**: {part.description}. {named}"


def regime_section(regime: str, runs: Sequence[Run], made: Sequence[Row], grid: Grid, reading: str) -> list[str]:
    """Heading, reading, result tables, picture and choosing table of one regime: blocks of Markdown."""
    settings = grid.regimes[regime]
    blocks = [f"## {settings.title}", settings.description, reading]
    for tuned in (False, True):
        if of_table := [row for row in made if (row["regime"], row["tuned"]) == (regime, tuned)]:
            rate = "each method's own learning rate" if tuned else f"the common learning rate, {grid.common(regime):g}"
            blocks += [f"### At {rate}", result_table(of_table, grid)]
            blocks += [] if tuned else [f"![{settings.title}: curves](stability_{regime}.png)"]
    if chosen := choosing_table(runs, grid, regime):
        blocks += ["### Choosing the learning rate", CHOOSING, chosen]
    return blocks


def report(runs: Sequence[Run], made: Sequence[Row], grid: Grid, reading: str) -> str:
    """`stability.md`."""
    sections = sections_of(reading, grid)
    choosing, judging = (", ".join(map(str, seeds)) for seeds in (grid.choosing_seeds, grid.judging_seeds))
    seconds = sum(run.record["seconds"] for run in runs)
    figures = {"runs": len(runs), "seconds": seconds, "resamples": RESAMPLES, "margin": MARGIN}
    worlds = worlds_text(runs, grid)
    blocks = [HEADER.format(choosing=choosing, judging=judging, worlds=worlds, **figures)]
    if made:
        blocks += ["## Overview", OVERVIEW, *overview(made, grid), "![Final sampled EM](stability.png)"]
    blocks.append(sections[""])
    have_run = {run.cell[0] for run in runs}
    for regime in filter(have_run.__contains__, grid.regimes):
        blocks += regime_section(regime, runs, made, grid, sections.get(regime, ""))
    for heading, parts in (("## Settings of the regimes", grid.regimes), ("## Settings of the methods", grid.methods)):
        blocks += [heading, "\n".join(map(settings_of, parts.values()))]
    if lacking := missing(runs, grid):
        blocks += ["## Not run yet", "\n".join(lacking)]
    return "\n\n".join(block.strip() for block in blocks if block) + "\n"


def _drawn(table: Table, grid: Grid) -> Table:
    """Of the methods that the pictures have."""
    return {method: runs for method, runs in table.items() if grid.methods[method].drawn}


def write_report(records: Iterable[Record], folder: Path, grid: Grid | None = None, reading: str = "") -> None:
    """Write `stability.json`, `stability.md`, `stability.png` and `stability_<regime>.png` into `folder`.

    `grid` is the published one unless given. `reading`, written by hand, has general remarks and then one section per
    regime, `## <its name>`. Errors are those of `read_runs`, `sections_of` and `new_figure`.
    """
    grid = grid or published_grid()
    runs = read_runs(records, grid)
    tables = judged(runs, grid)
    made = make_rows(tables, grid)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stability.json").write_text(json.dumps(made, indent=2, allow_nan=False) + "\n")
    (folder / "stability.md").write_text(report(runs, made, grid, reading))
    common = {regime: _drawn(table, grid) for (regime, tuned), table in tables.items() if table and not tuned}
    for regime, table in common.items():
        draw_regime(table, grid, grid.regimes[regime].title, folder / f"stability_{regime}.png")
    if common:
        draw_summary(common, grid, folder / "stability.png")
