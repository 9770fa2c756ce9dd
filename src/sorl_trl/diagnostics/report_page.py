"""The HTML page of a report: one file without scripts, for light and dark screens. All text from runs is escaped."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from sorl_trl.diagnostics.plots import color_of, dashes_of
from sorl_trl.diagnostics.runs import Run


@dataclass(frozen=True)
class Figure:
    """What the table says about one metric of one run."""

    value: str
    detail: str = ""


@dataclass(frozen=True)
class Row:
    """A line of the table: what it is about, and a figure per run, None where a run has none."""

    title: str
    metric: str
    figures: tuple[Figure | None, ...]


@dataclass(frozen=True)
class Page:
    """What the page shows of the runs.

    Args:
        runs: In the order of the tables.
        places: Name of a run -> the place of its line, which is that of its colour.
        summary: A line per run below a header, without its name.
        picture: The PNG of their curves.
        rows: The table, with a figure per run.
        findings: Per run, what stands out in it, a sentence each.
        notes: How to read all this, a paragraph each.
        rollouts: The PNG of their last rollouts, where there are any.
    """

    runs: Sequence[Run]
    places: Mapping[str, int]
    summary: Sequence[Sequence[str]]
    picture: bytes
    rows: Sequence[Row]
    findings: Sequence[Sequence[str]]
    notes: Sequence[str]
    rollouts: bytes | None = None


STROKES = {"-": "none", "--": "8 3", ":": "3 3", "-.": "9 3 3 3"}
"""Kind of line in the picture -> of its swatch."""
STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --faint: #667085; --line: #e4e7ec; --paper: #fff; --card: #f8f9fb; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --faint: #98a2b3; --line: #30363d; --paper: #121212; --card: #1b1d21; }
  /* The picture is drawn on white: its lightness is turned round and its hues stay, those of the swatches alike. */
  .drawn { filter: invert(0.93) hue-rotate(180deg); }
}
body { margin: 0 auto; max-width: 72rem; padding: 2.5rem 1.5rem 4rem; color: var(--ink); background: var(--paper);
  font: 15px/1.55 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.7rem; letter-spacing: -0.01em; }
h2 { margin: 2.6rem 0 0.9rem; font-size: 1.15rem; }
h3 { margin: 0; font-size: 1rem; overflow-wrap: anywhere; }
small, .faint { color: var(--faint); font-size: 0.83rem; }
.cards { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); }
.card { padding: 0.9rem 1.1rem; border: 1px solid var(--line); border-radius: 10px; background: var(--card); }
.card p, .card ul { margin: 0.5rem 0 0; }
.card ul { padding-left: 1.1rem; }
.swatch { width: 1.8rem; height: 8px; margin-right: 0.5rem; vertical-align: middle; }
.quiet { margin-top: 0.8rem; }
img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 0.45rem 1.4rem 0.45rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
th { font-weight: 600; }
.wide th:first-child, .wide td:first-child { position: sticky; left: 0; background: var(--paper);
  white-space: nowrap; }
.summary td, .summary th { padding-right: 1rem; white-space: nowrap; }
td small, th small { display: block; font-weight: 400; }
.settings { table-layout: fixed; margin-top: 0.6rem; font-size: 0.83rem; overflow-wrap: anywhere; }
.settings caption { padding: 0.8rem 0 0.2rem; font-weight: 600; text-align: left; }
.settings td { padding: 0.2rem 0.8rem 0.2rem 0; }
code { font: 0.95em ui-monospace, monospace; }
details { margin-top: 0.8rem; }
summary { cursor: pointer; overflow-wrap: anywhere; }
"""


def render_page(page: Page) -> str:
    """The whole HTML document."""
    names = escape(", ".join(run.name for run in page.runs))
    sections = [
        f"<h1>Training report</h1>\n<p class='faint'>{names}</p>",
        f"<h2>Runs</h2>\n<div class='wide'>\n{_summary(page)}\n</div>",
        f"<h2>What stands out</h2>\n{_cards(page)}",
        _picture("Curves", page.picture, f"Curves of {names}"),
        f"<h2>Figures</h2>\n<div class='wide'>\n{_table(page)}\n</div>",
        _picture("The last rollout", page.rollouts, f"Rollouts of {names}") if page.rollouts else "",
        _configurations(page),
        "<h2>How to read this</h2>",
        *(f"<p class='faint'>{escape(note)}</p>" for note in page.notes),
    ]
    head = "<meta charset='utf-8'>\n<meta name='viewport' content='width=device-width, initial-scale=1'>"
    head += f"\n<title>Training report: {names}</title>\n<style>{STYLE}</style>"
    body = "\n".join(filter(None, sections))
    return f"<!doctype html>\n<html lang='en'>\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n"


def _picture(title: str, picture: bytes, description: str) -> str:
    source = base64.b64encode(picture).decode("ascii")
    return f"<h2>{title}</h2>\n<img class='drawn' alt='{description}' src='data:image/png;base64,{source}'>"


def _summary(page: Page) -> str:
    header, *body = page.summary
    lines = [f"<tr>{''.join(f'<th scope=col>{escape(name)}</th>' for name in ('run', *header))}</tr>"]
    for run, cells in zip(page.runs, body, strict=True):
        shown = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f"<tr><th scope='row'>{_label(page, run)}</th>{shown}</tr>")
    return "<table class='summary'>\n" + "\n".join(lines) + "\n</table>"


def _cards(page: Page) -> str:
    """A card for each run of which there is something to say, and a line with the others."""
    told = [(run, findings) for run, findings in zip(page.runs, page.findings, strict=True) if findings]
    cards = "\n".join(
        f"<div class='card'><h3>{_label(page, run)}</h3>{_sentences(findings)}</div>" for run, findings in told
    )
    quiet = ", ".join(run.name for run, findings in zip(page.runs, page.findings, strict=True) if not findings)
    rest = f"<p class='faint quiet'>Nothing by the rules below: {escape(quiet)}.</p>" if quiet else ""
    return f"<div class='cards'>\n{cards}\n</div>{rest}" if told else rest


def _sentences(findings: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in findings) + "</ul>"


def _table(page: Page) -> str:
    header = "".join(f"<th scope='col'>{_label(page, run)}</th>" for run in page.runs)
    lines = [f"<tr><td></td>{header}</tr>"]
    for row in page.rows:
        title = f"<th scope='row'>{escape(row.title)}<small><code>{escape(row.metric)}</code></small></th>"
        lines.append(f"<tr>{title}{''.join(map(_cell, row.figures))}</tr>")
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return "<td class='faint'>–</td>"
    detail = f"<small>{escape(figure.detail)}</small>" if figure.detail else ""
    return f"<td>{escape(figure.value)}{detail}</td>"


def _label(page: Page, run: Run) -> str:
    place = page.places[run.name]
    line = f"<line x1='0' x2='30' y1='4' y2='4' stroke='{color_of(place)}' stroke-width='4'"
    line += f" stroke-dasharray='{STROKES[dashes_of(place)]}'/>"
    return f"<svg class='swatch drawn' viewBox='0 0 30 8'>{line}</svg>{escape(run.name)}"


def _configurations(page: Page) -> str:
    """A folded list of settings per run that has any; empty if none has."""
    folded = []
    for run in page.runs:
        if run.configuration:
            tables = "".join(_settings(name, settings) for name, settings in run.configuration.items())
            folded.append(f"<details><summary>{_label(page, run)}</summary>{tables}</details>")
    return "<h2>Configuration</h2>\n" + "\n".join(folded) if folded else ""


def _settings(name: str, settings: Mapping[str, Any]) -> str:
    lines = "".join(
        f"<tr><td><code>{escape(key)}</code></td><td>{escape(_setting(value))}</td></tr>"
        for key, value in settings.items()
        if value is not None
    )
    return f"<table class='settings'><caption><code>{escape(name)}</code></caption>{lines}</table>"


def _setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
