"""The HTML page of a report: one file without scripts, for light and dark screens. All text from runs is escaped."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from sorl_trl.diagnostics.plots import color_of
from sorl_trl.diagnostics.runs import Run, text_of


@dataclass(frozen=True)
class Row:
    """One thing to know of all runs. Of a text, all lines but the first are printed small."""

    title: str
    cells: Sequence[str]
    """Of each run, empty where it has nothing to say."""


NOTE = (
    "Values at the end are moving averages over a twentieth of the log entries, but 5 to 100 of them, where there are "
    "20 at least; below them are the lowest and the highest single entry. Alarms are those of the collapse guard's "
    "rules, as they would have come while the run trained: docs/stability.md says how far to trust them. Settings are "
    "those in which runs differ; “–” is one that a run left at its default."
)
STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --faint: #667085; --line: #e4e7ec; --paper: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --faint: #98a2b3; --line: #30363d; --paper: #121212; }
  /* The picture is drawn on white: its lightness is turned round and its hues stay, those of the swatches alike. */
  .drawn { filter: invert(0.93) hue-rotate(180deg); }
}
body { margin: 0 auto; max-width: 72rem; padding: 2.5rem 1.5rem 4rem; color: var(--ink); background: var(--paper);
  font: 15px/1.55 system-ui, sans-serif; }
h2 { margin: 2.6rem 0 0.9rem; font-size: 1.15rem; }
small { display: block; color: var(--faint); font-size: 0.83rem; font-weight: 400; }
.swatch { width: 1.8rem; height: 8px; margin-right: 0.5rem; vertical-align: middle; }
img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
th, td { padding: 0.45rem 1.4rem 0.45rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
code { font: 0.95em ui-monospace, monospace; }
"""


def render_page(runs: Sequence[Run], summary: Sequence[Row], picture: bytes, figures: Sequence[Row]) -> str:
    """The whole HTML document.

    Args:
        runs: In the order of the tables.
        summary: How each run went, and in which settings they differ.
        picture: The PNG of their curves.
        figures: A row per metric.
    """
    names = escape(", ".join(run.name for run in runs))
    labels = [_swatch(color_of(index)) + escape(run.name) for index, run in enumerate(runs)]
    source = f"data:image/png;base64,{base64.b64encode(picture).decode('ascii')}"
    told = [_settings(label, run) for label, run in zip(labels, runs, strict=True) if run.settings]
    sections = [
        f"<h1>Training report</h1>\n<p><small>{names}</small></p>",
        f"<h2>Runs</h2>\n{_table(labels, summary)}",
        f"<h2>Curves</h2>\n<img class='drawn' alt='Curves of {names}' src='{source}'>",
        f"<h2>Figures</h2>\n{_table(labels, figures)}",
        *(["<h2>Settings</h2>", *told] if told else []),
        f"<p><small>{escape(NOTE)}</small></p>",
    ]
    head = "<meta charset='utf-8'>\n<meta name='viewport' content='width=device-width, initial-scale=1'>"
    head += f"\n<title>Training report: {names}</title>\n<style>{STYLE}</style>"
    body = "\n".join(sections)
    return f"<!doctype html>\n<html lang='en'>\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n"


def _swatch(color: str) -> str:
    """A piece of the line in the picture."""
    line = f"<line x1='0' x2='30' y1='4' y2='4' stroke='{color}' stroke-width='4'/>"
    return f"<svg class='swatch drawn' viewBox='0 0 30 8'>{line}</svg>"


def _table(labels: Sequence[str], rows: Sequence[Row]) -> str:
    """A column per run, a line per row."""
    lines = ["".join(["<td></td>", *(f"<th scope='col'>{label}</th>" for label in labels)])]
    for row in rows:
        cells = "".join(f"<td>{_text(cell) or '–'}</td>" for cell in row.cells)
        lines.append(f"<th scope='row'>{_text(row.title)}</th>{cells}")
    return "<div class='wide'><table>\n" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "\n</table></div>"


def _text(lines: str) -> str:
    first, *others = map(escape, lines.split("\n"))
    return first + "".join(f"<small>{other}</small>" for other in others)


def _settings(label: str, run: Run) -> str:
    """A folded list of what a run was told."""
    lines = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(text_of(value))}</td></tr>"
        for name, value in run.settings.items()
    )
    return f"<details><summary>{label}</summary><table>{lines}</table></details>"
