"""Math as GitHub writes it, $`x`$: dollarmath takes the backticks for a part of the formula, and this removes them."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx


def strip_backticks(app: Sphinx, document: nodes.document) -> None:
    for formula in document.findall(nodes.math):
        text = formula.astext()
        if text.startswith("`") and text.endswith("`"):
            formula.children = [nodes.Text(text[1:-1])]
            formula.rawsource = text[1:-1]


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-read", strip_backticks)
    return {"parallel_read_safe": True}
