"""What is written for GitHub, as the site shows it: math in backticks, links to pages and code, long code."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
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


def open_code(app: Sphinx, document: nodes.document, page: str) -> None:
    """A link to Python code opens a page with it, instead of downloading it."""
    for link in list(document.findall(addnodes.download_reference)):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link["reftarget"]))
        if path.endswith(".py") and app.builder.format == "html":
            uri = app.builder.get_relative_uri(page, code_page(path))
            link.replace_self(nodes.reference("", "", *link.children, internal=True, refuri=uri))


def code_page(path: str) -> str:
    """Where viewcode puts a module of the package."""
    return f"_modules/{path.removeprefix('src/').removesuffix('.py')}"


def make_code_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The pages of linked code of which viewcode makes none, because the API pages describe nothing in it."""
    builder: Any = app.builder
    described = {f"_modules/{name.replace('.', '/')}" for name, found in app.env._viewcode_modules.items() if found}
    linked = (path for path in map(str, app.env.dlfiles) if path.endswith(".py"))
    for path in sorted(each for each in linked if code_page(each) not in described):
        code = builder.highlighter.highlight_block((Path(app.srcdir) / path).read_text("utf-8"), "python")
        yield code_page(path), {"title": path, "body": f"<h1>{path}</h1>\n{code}"}, "page.html"


def break_lines_well(
    app: Sphinx, page: str, template: str, context: dict[str, Any], document: nodes.document | None
) -> None:
    """No line ends behind the dashes of an option; the name of anything else may go on behind its `_`, `/` and `.`."""
    if document is not None:
        long = re.sub(
            r'(?<=<span class="pre">)[^<]+',
            lambda code: re.sub(r"([_.])(?=\w)", r"\1<wbr>", re.sub(r"/(?=\w)", '/<wbr class="slash">', code[0])),
            context["body"],
        )
        context["body"] = re.sub(
            r"(?<=[\s>])--(?:[\w-]|<wbr>)+(?=[^<>]*<)", r'<span class="option">\g<0></span>', long
        )


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-read", strip_backticks)
    app.connect("doctree-resolved", show_titles)
    app.connect("doctree-resolved", open_code)
    app.connect("html-collect-pages", make_code_pages)
    app.connect("html-page-context", break_lines_well)
    return {"parallel_read_safe": True}
