"""Turns questions into prompts, for base models (text) and chat models (messages)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from sorl_trl.qa.questions import Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The protocol of Search-R1 (arXiv 2503.09516), in our own words.
SEARCH_R1_TEMPLATE = (
    "You can look facts up with a search engine before you answer the question at the end.\n"
    "Before every step, think between <think> and </think>. If a fact is missing, ask for it with "
    "<search> your query </search>; the passages found are then shown to you between <information> and "
    "</information>. Search as often as you need. Once you know enough, give the answer alone, without any "
    "explanation, as <answer> your answer </answer>.\n"
    "Question: {question}\n"
)

CHOICE_INSTRUCTION = "Answer with the letter of the right option."
"""The last line of a multiple-choice question, below its options."""


def question_text(question: Question) -> str:
    """Return the text that replaces "{question}" in a template.

    This is the question itself or, if it has options, the question, the options one per line as "A. text", and
    `CHOICE_INSTRUCTION`. One template thus serves both open and multiple-choice questions.
    """
    if not question.options:
        return question.question
    # An option of several lines would look like several options.
    options = [f"{letter}. {' '.join(text.split())}" for letter, text in question.options.items()]
    return "\n".join([question.question, *options, CHOICE_INSTRUCTION])


def build_prompt_rows(
    questions: Iterable[Question],
    template: str = SEARCH_R1_TEMPLATE,
    conversational: bool = False,
    clean: Callable[[str], str] = str,
) -> list[dict[str, Any]]:
    """Make the rows of a training set, for `datasets.Dataset.from_list`.

    Args:
        questions: Open and multiple-choice questions, which may be mixed.
        template: The instructions, with "{question}" in place of the `question_text`. Other braces stay as they are.
        conversational: Whether to make chat prompts of one user message instead of text prompts.
        clean: A function applied to the text of each question first. `sorl_trl.rollout.Sanitizer(tokenizer).clean`
            keeps control tokens that a question spells out, such as `<|im_end|>`, from becoming such tokens.

    Returns:
        Rows of `prompt`, `question_id`, `question`, `golden_answers`, `data_source`. If any question has options,
        every row has `options`: a list of [letter, text] pairs, empty for an open question. All rows have the same
        columns, because `from_list` takes them from the first row.

    Raises:
        ValueError: `template` has no "{question}".
    """
    if "{question}" not in template:
        raise ValueError(f'template must hold "{{question}}", got {template!r}')
    questions = list(questions)
    with_options = any(question.options for question in questions)
    prompts = [template.replace("{question}", clean(question_text(question))) for question in questions]
    return [
        {
            "prompt": [{"role": "user", "content": prompt}] if conversational else prompt,
            "question_id": question.id,
            "question": question.question,
            "golden_answers": list(question.golden_answers),
            "data_source": question.data_source,
            # Pairs, because a column of mappings gets the letters of all rows, with `None` for those that a row lacks.
            **({"options": [list(pair) for pair in question.options.items()]} if with_options else {}),
        }
        for question, prompt in zip(questions, prompts, strict=True)
    ]


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Mapping[str, Any]], **template_kwargs: Any
) -> list[list[int]]:
    """Encode the prompts of `build_prompt_rows`: text as it is, messages with the chat template and its arguments."""
    shown = {"add_generation_prompt": True, "return_dict": False, **template_kwargs}
    by_template: Any = partial(tokenizer.apply_chat_template, **shown)
    prompts = [row["prompt"] for row in rows]
    return [list((tokenizer.encode if isinstance(each, str) else by_template)(each)) for each in prompts]
