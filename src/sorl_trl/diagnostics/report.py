"""Reports on training runs: `sorl report run/ [other_run/ …] --output report/`.

Writes `report.html`, one file with the curves of all runs, how far each got, and its alarms. It reads
`trainer_state.json`, even while a run trains.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from sorl_trl.diagnostics.collapse_detector import Alarm, detect
from sorl_trl.diagnostics.collapse_rules import NotFinite
from sorl_trl.diagnostics.plots import draw_runs
from sorl_trl.diagnostics.runs import Run, Series
from sorl_trl.files import write_whole

NOTE = (
    "Rewards are moving averages over a twentieth of the log entries, but 5 to 100 of them. Alarms are those of the "
    "collapse guard's rules, as they would have come while the run trained, but for gradients that were no numbers "
    "for some steps alone, as with fp16. docs/stability.md says how far to trust them."
)
STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 72rem; padding: 2.5rem 1.5rem; font: 15px/1.55 system-ui, sans-serif; }
img { max-width: 100%; }
table { border-collapse: collapse; overflow-wrap: anywhere; }
th, td { padding: 0.45rem 1.4rem 0.45rem 0; border-bottom: 1px solid #8888; text-align: left; vertical-align: top;
  white-space: pre-line; }
"""


def write_report(runs: Sequence[Run], folder: str | Path) -> Path:
    """Write `report.html` into `folder`, created if missing, and return its path. Runs must have different names.

    Raises:
        ImportError: Matplotlib is not installed.
        ValueError: No run has any of the metrics of `plots.METRICS`.
    """
    page = render_page(runs, draw_runs(runs))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "report.html", page.encode("utf-8"))
    return folder / "report.html"


def summary_of(run: Run) -> dict[str, str]:
    """How far a run got, its reward, and the alarms of the guard's rules."""
    return {
        "run": run.name,
        "optimizer steps": f"{run.last_step:,}" + (f" of {run.max_steps:,}" if run.max_steps else ""),
        "reward at the end": _last_and_best(run.series("reward").smoothed()),
        "alarms": "\n".join(alarm.message for alarm in detect(run.log_history) if _stands(alarm, run)) or "–",
    }


def _stands(alarm: Alarm, run: Run) -> bool:
    """Whether to report an alarm. With fp16, the scaler skips steps without finite gradients, which do not count."""
    logged = [entry[alarm.rule.metric] for entry in run.log_history if alarm.rule.metric in entry]
    return not isinstance(alarm.rule, NotFinite) or alarm.rule.breach(logged[-1:]) is not None


def _last_and_best(reward: Series) -> str:
    if not reward.values:
        return "–"
    best = max(reward.values)
    return f"{reward.values[-1]:.3f}\nbest {best:.3f}, step {reward.steps[reward.values.index(best)]:,}"


def render_page(runs: Sequence[Run], picture: bytes) -> str:
    """The whole HTML document, with the PNG of the runs' curves. All text from runs is escaped."""
    names = escape(", ".join(run.name for run in runs))
    return f"""<!doctype html>
<html lang='en'>
<head>
<meta charset='utf-8'>
<meta name='viewport' content='width=device-width, initial-scale=1'>
<title>Training report: {names}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>Training report</h1>
{_table([summary_of(run) for run in runs])}
<p><img alt='Curves of {names}' src='data:image/png;base64,{base64.b64encode(picture).decode("ascii")}'></p>
<p><small>{escape(NOTE)}</small></p>
</body>
</html>
"""


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """A table whose head is the keys of the rows, which all have the same."""
    lines = ["".join(f"<th scope='col'>{escape(title)}</th>" for title in rows[0])]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row.values()) for row in rows]
    return "<table>\n" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "\n</table>"
