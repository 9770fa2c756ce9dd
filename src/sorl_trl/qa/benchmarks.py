"""Public question sets by name, from the Hub or from a local folder in the same schema."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, overload

from sorl_trl.checks import POSITIVE_COUNT, check_choice, check_number
from sorl_trl.qa.benchmark_rows import (
    RowParser,
    UnusableRow,
    parse_flashrag,
    parse_medmcqa,
    parse_medqa,
    parse_pubmedqa,
    parse_search_r1,
)
from sorl_trl.qa.questions import Question

logger = logging.getLogger(__name__)

Family = Literal["general", "multi-hop", "medical", "mixed"]

_FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"
# `datasets` gives files called `dev.jsonl` the split "validation"; the Hub's own configs say "dev".
_SYNONYMS = {"dev": "validation", "validation": "dev"}


@dataclass(frozen=True)
class Benchmark:
    """Where a public question set is, and how its rows are read."""

    family: Family
    """"mixed": its rows carry the names of other sets as `data_source`."""
    hub_id: str
    config: str | None
    parse: RowParser
    evaluation_split: str
    """The test split, or the development split where the test split is missing or has no labels."""
    sizes: Mapping[str, int]
    """Split on the Hub -> expected number of rows. For information only."""


def _flashrag(family: Family, config: str, **sizes: int) -> Benchmark:
    return Benchmark(family, _FLASHRAG, config, parse_flashrag, "test" if "test" in sizes else "dev", sizes)


BENCHMARKS: Mapping[str, Benchmark] = {
    "nq": _flashrag("general", "nq", train=79_168, dev=8_757, test=3_610),
    "triviaqa": _flashrag("general", "triviaqa", train=78_785, dev=8_837, test=11_313),
    "popqa": _flashrag("general", "popqa", test=14_267),
    "hotpotqa": _flashrag("multi-hop", "hotpotqa", train=90_447, dev=7_405),
    "2wikimultihopqa": _flashrag("multi-hop", "2wikimultihopqa", train=15_000, dev=12_576),
    "musique": _flashrag("multi-hop", "musique", train=19_938, dev=2_417),
    "bamboogle": _flashrag("multi-hop", "bamboogle", test=125),
    "nq_hotpotqa_train": Benchmark(
        "mixed",
        "PeterGriffinJin/nq_hotpotqa_train",
        None,
        parse_search_r1,
        "test",
        # The training splits of nq and hotpotqa; the evaluation splits of the seven sets above.
        {"train": 169_615, "test": 51_713},
    ),
    "medqa": Benchmark(
        "medical",
        "GBaker/MedQA-USMLE-4-options",
        None,
        parse_medqa,
        "test",
        {"train": 10_178, "test": 1_273},
    ),
    "medmcqa": Benchmark(
        "medical",
        "openlifescienceai/medmcqa",
        None,
        parse_medmcqa,
        "validation",
        {"train": 182_822, "validation": 4_183, "test": 6_150},
    ),
    "pubmedqa": Benchmark(
        "medical",
        "qiaojin/PubMedQA",
        "pqa_labeled",
        parse_pubmedqa,
        "train",  # the only split of the labelled questions
        {"train": 1_000},
    ),
}
"""Name -> set. The names are those of FlashRAG where it has the set."""


@overload
def load_benchmark(
    name: str,
    split: str | None = None,
    source: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    streaming: Literal[False] = False,
) -> list[Question]: ...
@overload
def load_benchmark(
    name: str,
    split: str | None = None,
    source: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    *,
    streaming: Literal[True],
) -> Iterator[Question]: ...
def load_benchmark(
    name: str,
    split: str | None = None,
    source: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    streaming: bool = False,
) -> list[Question] | Iterator[Question]:
    """Load the questions of a public set.

    Rows without one clear answer are left out; how many, and why, is logged as a warning. In a set without ids a row
    gets "<split>_<row>"; the second of two equal ids gets "#2" at its end, and how many did is logged too.

    Args:
        name: A key of `BENCHMARKS`.
        split: Default: the set's `evaluation_split`. "dev" and "validation" mean the same.
        source: A local folder in the set's schema, read as `datasets.load_dataset` reads a folder: JSONL, JSON or
            Parquet files named after their splits. Default: the set on the Hub.
        limit: Stop after so many questions.
        streaming: Read row by row while iterating, instead of into memory.

    Returns:
        A list, or an iterator if `streaming`.

    Raises:
        ValueError: `name`, `split` or `limit` is not allowed. Or, if `streaming` only while iterating: a file is
            broken, a row is not in the set's schema (the message names set, row, counted from 0, and field), or no row
            can be used.
        FileNotFoundError: There is no such folder, or it has no data files.
    """
    check_choice("name", name, BENCHMARKS)
    if limit is not None:
        check_number("limit", limit, POSITIVE_COUNT)
    benchmark = BENCHMARKS[name]
    split = benchmark.evaluation_split if split is None else split
    rows = _rows(_load(benchmark, source, streaming), name, split)
    questions = islice(_questions(rows, name, split), limit)
    return questions if streaming else list(questions)


def _load(benchmark: Benchmark, source: str | os.PathLike[str] | None, streaming: bool) -> Mapping[str, Any]:
    """Split -> its rows."""
    # Here, because importing it takes seconds that whoever only scores answers need not wait.
    from datasets import get_dataset_config_names, load_dataset
    from datasets.exceptions import DatasetGenerationError

    path, config = benchmark.hub_id, benchmark.config
    if source is not None:
        # `load_dataset` would look on the Hub for what is not here.
        if not Path(source).is_dir():
            raise FileNotFoundError(f"source must be an existing folder, got {os.fspath(source)!r}")
        path = os.fspath(Path(source).resolve())
        # A copy of the Hub's repository has the config, a folder with this set's files alone has not.
        config = config if config in get_dataset_config_names(path) else None
    try:
        splits: Mapping[str, Any] = load_dataset(path, config, streaming=streaming)
    except DatasetGenerationError as error:
        raise ValueError(f"{path}: cannot be read ({error.__cause__})") from error
    return splits


def _rows(splits: Mapping[str, Any], name: str, split: str) -> Iterator[dict[str, Any]]:
    found = split if split in splits else _SYNONYMS.get(split, split)
    if found not in splits:
        raise ValueError(f"split of {name} must be one of {', '.join(splits)}, got {split!r}")
    return _read(splits[found], f"{name}, split {split!r}")


def _read(rows: Iterable[dict[str, Any]], where: str) -> Iterator[dict[str, Any]]:
    try:
        yield from rows
    except ValueError as error:  # a stream meets a broken file only here
        raise ValueError(f"{where}: cannot be read ({error})") from error


@dataclass
class _Tally:
    """What happened to the rows of one split that did not become questions as they are."""

    left_out: Counter[str] = field(default_factory=Counter)
    """Reason -> rows."""
    renamed: int = 0
    ids: set[str] = field(default_factory=set)

    def with_new_id(self, question: Question) -> Question:
        """The question, with a suffix to its id if another one has it."""
        copy, number = question, 2
        while copy.id in self.ids:
            copy, number = replace(question, id=f"{question.id}#{number}"), number + 1
        self.renamed += copy is not question
        self.ids.add(copy.id)
        return copy

    def report(self, where: str) -> None:
        if self.left_out:
            reasons = "; ".join(f"{count}: {reason}" for reason, count in self.left_out.most_common())
            logger.warning("%s: rows left out: %d (%s)", where, self.left_out.total(), reasons)
        if self.renamed:
            logger.warning("%s: ids that had occurred before and got a suffix: %d", where, self.renamed)


def _questions(rows: Iterable[dict[str, Any]], name: str, split: str) -> Iterator[Question]:
    parse, tally, where = BENCHMARKS[name].parse, _Tally(), f"{name}, split {split!r}"
    try:
        for number, row in enumerate(rows):
            try:
                question = parse({"id": f"{split}_{number}", "data_source": name} | row)
            except UnusableRow as reason:
                tally.left_out[str(reason)] += 1
            except ValueError as error:
                raise ValueError(f"{where}, row {number}: {error}") from error
            else:
                yield tally.with_new_id(question)
    finally:  # also when the caller has had enough
        tally.report(where)
    if not tally.ids:
        raise ValueError(f"{where}: no row can be used ({dict(tally.left_out) or 'there are none'})")
