"""Formulas as MathML, which browsers draw themselves: pages need neither a network nor a script."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx

ACCENTED = re.compile(r'<munderover>(\s*<mi>.</mi>)(.*?)(<mo stretchy="false">.</mo>)\s*</munderover>', re.DOTALL)


def mathml(formula: str, as_block: bool = False) -> str:
    """Variables of one letter are marked, and the style sheet slants them: browsers would look for a math font.

    docutils puts the index of a letter with an accent below the letter.
    """
    made = ACCENTED.sub(r"<msub><mover>\1\3</mover>\2</msub>", tex2mathml(formula, as_block=as_block))
    return re.sub("<mi>(.)</mi>", r'<mi class="variable">\1</mi>', made)


def visit_inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def visit_block(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="formula">{mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True}
