"""Reports on training runs: `sorl report run/ [other_run/ …] --output report/`.

Writes `report.png`, the curves of all runs, and `report.html`, one file with these curves, a table of figures, the
alarms of each run and what it was told. Reads `trainer_state.json` and `settings.json`, at any time of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sorl_trl.command_line import Parser, mistakes
from sorl_trl.diagnostics.collapse_detector import detect
from sorl_trl.diagnostics.plots import draw_runs, series_of, visible_panels
from sorl_trl.diagnostics.report_page import Row, render_page
from sorl_trl.diagnostics.runs import Run, Series, differing_settings, load_runs
from sorl_trl.files import write_whole


def write_report(runs: Sequence[Run], folder: str | Path) -> Path:
    """Write `report.png` and `report.html`.

    Args:
        runs: What `load_runs` returns: at least one, with different names.
        folder: Where they go; made if missing.

    Returns:
        The path of the page. It needs no other file.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: No run has any of the metrics of `plots.PANELS`.
    """
    picture = draw_runs(runs)
    page = render_page(runs, summary_of(runs), picture, figures_of(runs))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "report.png", picture)
    write_whole(folder / "report.html", page.encode("utf-8"))
    return folder / "report.html"


def summary_of(runs: Sequence[Run]) -> list[Row]:
    """How far each run got, its reward, the alarms of the guard's rules, and the settings in which runs differ."""
    alarms = [[alarm.message for alarm in detect(run.log_history)] for run in runs]
    return [
        Row(
            "optimizer steps",
            [f"{run.last_step:,}" + (f" of {run.max_steps:,}" if run.max_steps else "") for run in runs],
        ),
        Row("reward at the end", [_last_and_best(run.series("reward").smoothed()) for run in runs]),
        Row("alarms", ["\n".join(messages) for messages in alarms]),
        *(Row(name, values) for name, values in differing_settings(runs).items()),
    ]


def _last_and_best(reward: Series) -> str:
    if not reward.values:
        return ""
    best = max(reward.values)
    return f"{reward.values[-1]:.3f}\nbest {best:.3f}, step {reward.steps[reward.values.index(best)]:,}"


def figures_of(runs: Sequence[Run]) -> list[Row]:
    """A row per metric that at least one run has, in the order of the panels; evaluations have rows of their own."""
    rows = []
    for panel in visible_panels(runs):
        trained, evaluated = zip(*(series_of(run, panel) for run in runs), strict=True)
        rows.append(Row(f"{panel.title}\n{panel.metric}", [_figure(series) for series in trained]))
        rows.append(Row(f"{panel.title}\neval_{panel.metric}", [_figure(series) for series in evaluated]))
    return [row for row in rows if any(row.cells)]


def _figure(series: Series) -> str:
    if not series.values:
        return ""
    return f"{series.smoothed().values[-1]:.3g}\n{min(series.values):.3g} to {max(series.values):.3g}"


def main(words: Sequence[str] | None = None) -> None:
    parser = Parser(
        prog="sorl report",
        description="Curves and figures of training runs, side by side, as a PNG and as one HTML page.",
        epilog="A run that is still training can be read once it has saved a checkpoint.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="run", help="its `output_dir`: holds trainer_state.json")
    where = "default: %(default)s"
    parser.add_argument("-o", "--output", type=Path, default=Path("report"), metavar="DIR", help=where)
    arguments = parser.parse_args(words)
    with mistakes():
        page = write_report(load_runs(arguments.runs), arguments.output)
    print(f"Curves: {page.with_name('report.png')}\nPage:   {page}")
