"""Docstrings of this package, which are Markdown where TRL's are, as reStructuredText."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring

FENCE = re.compile(r"^( *)```(\w+)$")
ANNOTATED = re.compile(r"~?[\w.]*Annotated\[((?:[^,\[\]]|\[[^\]]*\])+), [~\w.]+\([^()]*(?:\([^()]*\)[^()]*)*\)\]")
LINK = re.compile(r"\[(`[^`]+`)\]")
CLASS = re.compile(r"`([A-Z]\w{4,})`")
CODE = re.compile(r"(?<!`)(`[^`]+`)(?!`)")


def to_restructured_text(lines: list[str]) -> list[str]:
    """The same docstring with code blocks as directives, and links such as [`SOGRPOTrainer`] without brackets."""
    result, indent = [], ""
    for line in lines:
        if fence := FENCE.match(line):
            result += [f"{fence[1]}.. code-block:: {fence[2]}", ""]
            indent = "    "
        elif line.strip() == "```":
            indent = ""
        else:
            result.append(f"{indent}{line}" if indent and line else plain(line))
    return result


def plain(line: str) -> str:
    """Outside of code spans |y| is no substitution, and a letter may follow one; in one may be the name of a class."""
    parts = CODE.split(LINK.sub(r"\1", line))
    for i, part in enumerate(parts):
        if i % 2 == 1:
            parts[i] = CLASS.sub(r"`.\1`", part)  # the dot has Sphinx look for it in every module
        else:
            parts[i] = part.replace("|", r"\|")
            if i and part[:1].isalnum():
                parts[i] = rf"\ {parts[i]}"
    return "".join(parts)


def convert(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    lines[:] = to_restructured_text(lines)
    if what not in ("attribute", "data", "property"):  # whose first colon napoleon would take for the end of a type
        lines[:] = GoogleDocstring(lines, app.config, app, what, name, value, options).lines()


def shorten(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str, str | None] | None:
    """A config has more than a hundred arguments, which are TRL's: its docstring lists those that are not.

    Elsewhere, what an annotation allows is in the docstring, and a default that is made by a function is no Python, so
    that Sphinx would give up on the rest.
    """
    if name.endswith("Config") and len(signature or "") > 2000:
        return "(…)", None
    return (ANNOTATED.sub(r"\1", signature).replace("<factory>", "..."), returned) if signature else None


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", convert)
    app.connect("autodoc-process-signature", shorten)
    return {"parallel_read_safe": True}
