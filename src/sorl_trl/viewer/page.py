"""The trajectory page: one HTML file with its style, its scripts and its data. It loads nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from sorl_trl.viewer.data import Entry

STYLE = "view.css"
SCRIPTS = ("view_text.js", "view_trajectory.js", "view_list.js")


def render_page(title: str, kind: str, entries: Sequence[Entry], notes: Sequence[str] = ()) -> str:
    """The whole HTML document, of the kind `EVALUATION` or `TRAINING`; the browser is told to fetch nothing."""
    style, *scripts = (_resource(name) for name in (STYLE, *SCRIPTS))
    return Template(_resource("view.html")).substitute(
        title=escape(title),
        style=style,
        data=_embedded(kind, entries, notes),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def embed(content: Any) -> str:
    """JSON that no HTML parser can misread: without `<`, and in ASCII, so that any text fits, even half characters."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", r"\u003c")


def _embedded(kind: str, entries: Sequence[Entry], notes: Sequence[str]) -> str:
    """Embed each trajectory by itself, because `json` holds a separate text for every number that it is given."""
    head = embed({"kind": kind, "notes": notes})
    trajectories = ",".join(embed(vars(entry)) for entry in entries)
    return f'{head[:-1]},"trajectories":[{trajectories}]}}'


def _resource(name: str) -> str:
    return files("sorl_trl.viewer").joinpath(f"assets/{name}").read_text(encoding="utf-8")
