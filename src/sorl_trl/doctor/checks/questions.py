"""The training questions: whether they can be read, rewarded and fitted into the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sorl_trl import qa
from sorl_trl.doctor.findings import Finding
from sorl_trl.doctor.subject import Subject, given
from sorl_trl.evaluation import encode_prompts
from sorl_trl.recipe.build import choice_problems
from sorl_trl.text import one_line

SAMPLE = 2000
"""Questions that are looked at: measuring all of a large set takes minutes."""


def check_questions(subject: Subject) -> Iterator[Finding]:
    """Loads the questions to train on and those to evaluate on; of a public set only as many as are looked at."""
    task = given(subject.arguments.task, "the arguments of the task")
    for argument, split in (("train_questions", "train"), ("eval_questions", None)):
        source = getattr(task, argument)
        if source is None:
            continue
        try:
            found, in_all = _load(source, split)
        except (OSError, ValueError, ImportError) as error:
            line = subject.recipe.line(argument)
            yield Finding("error", one_line(error) + _without_answers(source), line)
            continue
        if argument == "train_questions":
            subject.questions, subject.questions_in_all = found[:SAMPLE], in_all
        yield from _check_options(subject, source, found)
        yield Finding("ok", f"`{argument}`: {in_all}")


def _load(source: str, split: str | None) -> tuple[list[qa.Question], int]:
    """Questions, of a public set the first, and how many there are."""
    if source not in qa.BENCHMARKS:
        questions = qa.load_questions(source)
        return questions, len(questions)
    benchmark = qa.BENCHMARKS[source]
    questions = list(qa.load_benchmark(source, split, limit=SAMPLE, streaming=True))
    return questions, benchmark.sizes[split or benchmark.evaluation_split]


def _check_options(subject: Subject, source: str, questions: Sequence[qa.Question]) -> Iterator[Finding]:
    """Whether 'choice' has something to choose from."""
    for problem in choice_problems(subject.raw.rewards, questions):
        first = next(question for question in questions if not question.options)
        what = f"{problem.what.removesuffix('.')}{_line_of(source, first)}."
        yield subject.recipe.finding(replace(problem, what=what))


def _without_answers(source: str) -> str:
    """How many lines of a file have no golden answer, in case that is what is wrong with it."""
    if not Path(source).is_file():
        return ""
    records = [record for _, record in _records(source)]
    missing = sum(not record.get("golden_answers") for record in records)
    return f" ({missing} of {len(records)} lines have no `golden_answers`)" if missing else ""


def _line_of(source: str, question: qa.Question) -> str:
    if not Path(source).is_file():
        return ""
    number = next(number for number, record in _records(source) if str(record.get("id")) == question.id)
    return f" (line {number} of {source})"


def _records(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line and content of every line that holds a JSON object."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield number, record


def check_tokens(subject: Subject) -> Iterator[Finding]:
    """Whether what a trajectory may take fits where it has to."""
    rollout, budget = subject.rollout, subject.max_completion_length
    turn = rollout.max_turn_tokens
    step = turn + rollout.max_observation_tokens
    full = rollout.max_turns * step + turn
    if full > budget:
        fitting = (
            f"{(budget - turn) // step} of {rollout.max_turns} searches fit" if budget >= turn else "not one fits"
        )
        what = f"{rollout.max_turns} turns with observations and a last one may take {full} tokens, but "
        what += f"`max_completion_length` is {budget}: where all are that long, {fitting}"
        yield Finding("warning", what, subject.recipe.line("max_completion_length", full))
    else:
        yield Finding("ok", f"all turns and observations fit: at most {full} of {budget} tokens")
    yield from _check_context(subject, budget)


def _check_context(subject: Subject, budget: int) -> Iterator[Finding]:
    lengths = [len(ids) for ids in prompts_of(subject, given(subject.questions, "questions"))]
    longest = max(lengths)
    shown = f"the longest of {len(lengths)} prompts has {longest} tokens"
    needed, window = longest + budget, subject.raw.vllm_max_model_length if subject.raw.use_vllm else None
    with_completion = f"{shown}, with `max_completion_length` {needed}"
    if subject.positions and needed > subject.positions:
        line = subject.recipe.line("max_completion_length", max(subject.positions - longest, 1))
        what = f"{with_completion}, but the model has {subject.positions} positions"
        yield _beyond(what, longest, subject.positions, line)
    if window and needed > window:
        line = subject.recipe.line("vllm_max_model_length", needed)
        yield _beyond(f"{with_completion}, but `vllm_max_model_length` is {window}", longest, window, line)
    yield Finding("ok", shown)


def _beyond(what: str, longest: int, window: int, line: str) -> Finding:
    """Trajectories end where the window does; a prompt that fills it is not answered at all."""
    if longest < window:
        return Finding("warning", f"{what}: trajectories that reach it end there, with `context_limit`", line)
    return Finding("error", f"{what}: that prompt gets no answer", line)


def prompts_of(subject: Subject, questions: Sequence[qa.Question]) -> list[list[int]]:
    """Token ids of the prompts of some questions."""
    tokenizer = given(subject.tokenizer, "the tokenizer")
    given(subject.chat_template_works or None, "a chat template that works")
    rows = qa.build_prompt_rows(questions, subject.rollout.prompt_template, subject.rollout.chat)
    return encode_prompts(tokenizer, rows, subject.chat_template_kwargs)
