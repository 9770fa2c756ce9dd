"""What is written for GitHub, as the site shows it: math in backticks, links named after files, long code."""

from __future__ import annotations

import posixpath
import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx


def strip_backticks(app: Sphinx, document: nodes.document) -> None:
    """In $`x`$, dollarmath takes the backticks for a part of the formula."""
    for formula in document.findall(nodes.math):
        text = formula.astext()
        if text.startswith("`") and text.endswith("`"):
            formula.children = [nodes.Text(text[1:-1])]
            formula.rawsource = text[1:-1]


def show_titles(app: Sphinx, document: nodes.document, page: str) -> None:
    """A link whose text is the name of a page's file shows the title of that page."""
    for link in document.findall(nodes.reference):
        if link.get("internal") and link.astext().endswith(".md") and "refuri" in link:
            path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link["refuri"].partition("#")[0]))
            if title := app.env.titles.get(path.removesuffix(".html")):
                link.children = [nodes.inline(text=title.astext())]


def break_lines_well(
    app: Sphinx, page: str, template: str, context: dict[str, Any], document: nodes.document | None
) -> None:
    """No line ends behind the dashes of an option; the name of anything else may go on behind its `_`, `/` and `.`."""
    if document is not None:
        long = re.sub(
            r'(?<=<span class="pre">)[^<]+',
            lambda code: re.sub(r"([_/.])(?=\w)", r"\1<wbr>", code[0]),
            context["body"],
        )
        context["body"] = re.sub(
            r"(?<=[\s>])--(?:[\w-]|<wbr>)+(?=[^<>]*<)", r'<span class="option">\g<0></span>', long
        )


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-read", strip_backticks)
    app.connect("doctree-resolved", show_titles)
    app.connect("html-page-context", break_lines_well)
    return {"parallel_read_safe": True}
