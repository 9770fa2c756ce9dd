"""All checks, one after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from sorl_trl.doctor.checks.method import check_batches, check_method, check_options, check_vllm
from sorl_trl.doctor.checks.model import check_chat, check_model, check_tags
from sorl_trl.doctor.checks.questions import check_questions, check_tokens
from sorl_trl.doctor.checks.rehearsal import check_rehearsal
from sorl_trl.doctor.checks.search import check_search
from sorl_trl.doctor.checks.switches import check_switches
from sorl_trl.doctor.findings import Finding, Unavailable
from sorl_trl.doctor.reading.arguments import read_arguments
from sorl_trl.doctor.reading.recipe_file import read_recipe
from sorl_trl.doctor.subject import Subject
from sorl_trl.text import one_line

logger = logging.getLogger(__name__)


def check_arguments(subject: Subject) -> list[Finding]:
    """Reads the recipe and the command line as `train.py` does."""
    subject.arguments = read_arguments(subject.recipe, subject.words, subject.num_processes)
    return subject.arguments.findings


CHECKS: dict[str, Callable[[Subject], Iterable[Finding]]] = {
    "arguments": check_arguments,
    "model": check_model,
    "tags": check_tags,
    "chat": check_chat,
    "questions": check_questions,
    "batches": check_batches,
    "tokens": check_tokens,
    "search": check_search,
    "rehearsal": check_rehearsal,
    "vllm": check_vllm,
    "options": check_options,
    "switches": check_switches,
    "method": check_method,
}
"""In an order in which each finds what it needs of the others."""


def examine(path: str, words: Sequence[str] = (), num_processes: int = 1) -> list[Finding]:
    """What is wrong with a recipe, and what was seen to be right.

    Args:
        path: The recipe.
        words: What follows `--config` and the recipe on the command line of `train.py`.
        num_processes: On how many processes it is to be trained.
    """
    try:
        recipe = read_recipe(path, words)
    except (OSError, ValueError) as error:
        return [Finding("error", str(error), check="arguments")]
    subject = Subject(recipe, ["--config", path, *words], num_processes)
    return [replace(finding, check=name) for name in CHECKS for finding in _run(name, subject)]


def _run(name: str, subject: Subject) -> Iterator[Finding]:
    try:
        yield from CHECKS[name](subject)
    except Unavailable as missing:
        yield Finding("skipped", f"not checked, for want of {missing}")
    except Exception as error:  # a mistake in one check must not keep back what the others have found
        logger.warning("The check %r failed", name, exc_info=True)
        yield Finding("error", f"this check itself failed: {type(error).__name__}: {one_line(error)}")
