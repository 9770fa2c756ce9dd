"""Public question sets by name, from the Hub or from a local folder in the same schema.

Each schema has a parser that turns a row, a mapping from column to value, into a `Question`. It raises a KeyError or a
ValueError that names the field if the row is not in its schema, and `UnusableRow` if the row does not give a question
with an answer. The loader adds the columns `id` and `data_source` if a set lacks them.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sorl_trl.checks import check_choice
from sorl_trl.qa.questions import Question, mapping, text
from sorl_trl.text import identifier

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]
RowParser = Callable[[Row], Question]

_DECISIONS = {"A": "yes", "B": "no", "C": "maybe"}
# `datasets` gives files called `dev.jsonl` the split "validation"; the Hub's own configs use "dev".
_SYNONYMS = {"dev": "validation", "validation": "dev"}


class UnusableRow(ValueError):
    """A row without one clear answer, or with a required text blank. The message gives the reason, but no values."""


def parse_flashrag(row: Row) -> Question:
    """FlashRAG: `id, question, golden_answers, metadata`; `metadata` may be missing or `None`.

    Blank golden answers are left out, because no answer could match them.
    """
    given = row["golden_answers"] or []
    if not isinstance(given, list) or not all(isinstance(answer, str) for answer in given):
        raise ValueError(f"`golden_answers` must be a list of strings, got {given!r}")
    answers = tuple(answer for answer in given if answer.strip())
    if not answers:
        raise UnusableRow("`golden_answers` is empty")
    return Question(
        id=identifier("id", row["id"]),
        question=_text(row, "question"),
        golden_answers=answers,
        metadata=mapping("metadata", row.get("metadata")),
        data_source=_text(row, "data_source"),
    )


def parse_search_r1(row: Row) -> Question:
    """Search-R1: FlashRAG's columns; verl's columns have the same content and are ignored.

    The set is a mixture of sources with overlapping ids, so each id is prefixed with its source's name.
    """
    question = parse_flashrag(row)
    return replace(question, id=f"{question.data_source}-{question.id}")


def parse_medqa(row: Row) -> Question:
    """MedQA: `question, options{A…}, answer_idx`, a letter; the other columns become metadata."""
    letters = [letter for letter, each in row["options"].items() if each is not None]  # others may have more
    options = {letter: _text(row["options"], letter) for letter in letters}
    right = _text(row, "answer_idx")
    if right not in options:
        raise ValueError(f"`answer_idx` must be one of {letters}, got {right!r}")
    return _choice(row, options, options[right], "answer_idx")


def parse_medmcqa(row: Row) -> Question:
    """MedMCQA: `question, opa, opb, opc, opd, cop`; the other columns become metadata.

    `cop` counts from 0; -1 or `None` means that the question has no label.
    """
    columns = ("opa", "opb", "opc", "opd")
    cop = row["cop"]
    if cop in (None, -1):
        raise UnusableRow("`cop` is not a label")
    if isinstance(cop, bool) or not isinstance(cop, int) or cop not in range(len(columns)):
        raise ValueError(f"`cop` must be 0 to 3, counted from 0, or -1 for no label, got {cop!r}")
    options = {letter: _text(row, column) for letter, column in zip("ABCD", columns, strict=True)}
    return _choice(row, options, options["ABCD"[cop]], "cop", *columns)


def parse_pubmedqa(row: Row) -> Question:
    """PubMedQA: `pubid, question, final_decision` of yes, no and maybe, which become the options A, B and C.

    The abstract in `context` is not shown, because the agent should search; it becomes metadata, like other columns.
    """
    row = {**row, "id": identifier("pubid", row["pubid"])}
    return _choice(row, _DECISIONS, _text(row, "final_decision"), "pubid", "final_decision")


def _choice(row: Row, options: Mapping[str, str], right: str, *used: str) -> Question:
    """A multiple-choice question with the text of its right option; columns not `used` become metadata."""
    if list(options.values()).count(right) > 1:
        raise UnusableRow("another option has the right option's text")
    known = {"id", "question", "options", "data_source", *used}
    return Question(
        id=identifier("id", row["id"]),
        question=_text(row, "question"),
        golden_answers=(right,),
        metadata={name: value for name, value in row.items() if name not in known},
        options=dict(options),
        data_source=_text(row, "data_source"),
    )


def _text(row: Row, name: str) -> str:
    value = row[name]
    if value is None or (isinstance(value, str) and not value.strip()):
        raise UnusableRow(f"`{name}` is blank")
    return text(name, value).strip()


@dataclass(frozen=True)
class Benchmark:
    """Where a public question set is, and how to read its rows."""

    hub_id: str
    config: str | None
    parse: RowParser
    evaluation_split: str
    """The test split, or the development split if the test split is missing or has no labels."""
    own_files: tuple[str, ...] = ()
    """Splits in separate Parquet files with different columns, which `datasets` can only read one by one."""


def _flashrag(config: str, evaluation_split: str) -> Benchmark:
    return Benchmark("RUC-NLPIR/FlashRAG_datasets", config, parse_flashrag, evaluation_split)


BENCHMARKS: Mapping[str, Benchmark] = {
    "nq": _flashrag("nq", "test"),
    "triviaqa": _flashrag("triviaqa", "test"),
    "popqa": _flashrag("popqa", "test"),
    "hotpotqa": _flashrag("hotpotqa", "dev"),
    "2wikimultihopqa": _flashrag("2wikimultihopqa", "dev"),
    "musique": _flashrag("musique", "dev"),
    "bamboogle": _flashrag("bamboogle", "test"),
    # The training splits of nq and hotpotqa; the evaluation splits of the seven sets above.
    "nq_hotpotqa_train": Benchmark(
        "PeterJinGo/nq_hotpotqa_train", None, parse_search_r1, "test", own_files=("train", "test")
    ),
    "medqa": Benchmark("GBaker/MedQA-USMLE-4-options", None, parse_medqa, "test"),
    "medmcqa": Benchmark("openlifescienceai/medmcqa", None, parse_medmcqa, "validation"),
    # The only split of the labelled questions.
    "pubmedqa": Benchmark("qiaojin/PubMedQA", "pqa_labeled", parse_pubmedqa, "train"),
}
"""The sets by name; FlashRAG's names where it has the set."""


def load_benchmark(
    name: str,
    split: str | None = None,
    source: str | os.PathLike[str] | None = None,
    limit: int | None = None,
) -> list[Question]:
    """Load the questions of a public set.

    Rows without one clear answer are left out, with a warning that gives number and reasons. If a set has no ids, rows
    get "<split>_<row>".

    Args:
        name: A key of `BENCHMARKS`.
        split: Default: the set's `evaluation_split`. "dev" and "validation" mean the same.
        source: A local folder in the set's schema, read as `datasets.load_dataset` reads a folder: JSONL, JSON or
            Parquet files named after their splits. Default: the set on the Hub.
        limit: The most questions to load.

    Raises:
        ValueError: `name` or `split` is not allowed, a file is broken, a row is not in the set's schema (the message
            names the set, the field, and the row, counted from 0), or no row can be used.
        FileNotFoundError: There is no such folder, or it has no data files.
    """
    check_choice("name", name, BENCHMARKS)
    benchmark = BENCHMARKS[name]
    split = benchmark.evaluation_split if split is None else split
    if benchmark.own_files:
        check_choice(f"split of {name}", split, benchmark.own_files)
    splits = _load(benchmark, source, split)
    found = split if split in splits else _SYNONYMS.get(split, split)
    if found not in splits:
        raise ValueError(f"split of {name} must be one of {', '.join(splits)}, got {split!r}")
    rows = ({"id": f"{split}_{number}", "data_source": name} | row for number, row in enumerate(splits[found]))
    return _questions(rows, benchmark.parse, limit, f"{name}, split {split!r}")


def _load(benchmark: Benchmark, source: str | os.PathLike[str] | None, split: str) -> Mapping[str, Any]:
    """Map each split to its rows. If splits have their own files, only `split` is loaded."""
    # Imported here, because it takes seconds, and code that only scores answers does not need it.
    from datasets import get_dataset_config_names, load_dataset
    from datasets.exceptions import DatasetGenerationError

    path, config, files = benchmark.hub_id, benchmark.config, None
    if source is None and benchmark.own_files:
        path, files = "parquet", {split: f"hf://datasets/{benchmark.hub_id}/{split}.parquet"}
    if source is not None:
        # `load_dataset` would look on the Hub for a missing folder.
        if not Path(source).is_dir():
            raise FileNotFoundError(f"source must be an existing folder, got {os.fspath(source)!r}")
        path = os.fspath(Path(source).resolve())
        # A copy of the Hub's repository has the config; a folder with only this set's files does not.
        config = config if config in get_dataset_config_names(path) else None
        files = {split: f"{split}.*"} if benchmark.own_files else None
    try:
        splits: Mapping[str, Any] = load_dataset(path, config, data_files=files)
    except DatasetGenerationError as error:
        raise ValueError(f"{path}: cannot be read ({error.__cause__})") from error
    return splits


def _questions(rows: Iterable[Row], parse: RowParser, limit: int | None, where: str) -> list[Question]:
    questions: list[Question] = []
    left_out: Counter[str] = Counter()
    for number, row in enumerate(rows):
        if len(questions) == limit:
            break
        try:
            questions.append(parse(row))
        except UnusableRow as reason:
            left_out[str(reason)] += 1
        except KeyError as error:
            raise ValueError(f"{where}, row {number}: {error} is missing; the row has {sorted(row)}") from error
        except ValueError as error:
            raise ValueError(f"{where}, row {number}: {error}") from error
    reasons = "; ".join(f"{count}: {reason}" for reason, count in left_out.most_common())
    if not questions:
        raise ValueError(f"{where}: no usable row ({reasons or 'there are none'})")
    if left_out:
        logger.warning("%s: rows left out: %d (%s)", where, left_out.total(), reasons)
    return questions
