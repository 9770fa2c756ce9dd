"""Public question sets by name, from the Hub or from a local folder in the same schema."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sorl_trl.checks import check_choice
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

_FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"
# `datasets` gives files called `dev.jsonl` the split "validation"; the Hub's own configs say "dev".
_SYNONYMS = {"dev": "validation", "validation": "dev"}


@dataclass(frozen=True)
class Benchmark:
    """Where a public question set is, and how to read its rows."""

    hub_id: str
    config: str | None
    parse: RowParser
    evaluation_split: str
    """The test split, or the development split if the test split is missing or has no labels."""
    own_files: tuple[str, ...] = ()
    """Splits of one Parquet file each whose columns differ, which `datasets` can only read one by one."""


def _flashrag(config: str, evaluation_split: str) -> Benchmark:
    return Benchmark(_FLASHRAG, config, parse_flashrag, evaluation_split)


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
"""The sets by name. The names are FlashRAG's if it has the set."""


def load_benchmark(
    name: str,
    split: str | None = None,
    source: str | os.PathLike[str] | None = None,
    limit: int | None = None,
) -> list[Question]:
    """Load the questions of a public set.

    Rows without one clear answer are left out, and a warning says how many and why. If a set has no ids, rows get
    "<split>_<row>".

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
    splits = _load(benchmark, source, split)
    found = split if split in splits else _SYNONYMS.get(split, split)
    if found not in splits:
        raise ValueError(f"split of {name} must be one of {', '.join(splits)}, got {split!r}")
    where = f"{name}, split {split!r}"
    rows = ({"id": f"{split}_{number}", "data_source": name} | row for number, row in enumerate(splits[found]))
    return _questions(rows, benchmark.parse, limit, where)


def _load(benchmark: Benchmark, source: str | os.PathLike[str] | None, split: str) -> Mapping[str, Any]:
    """Map each split to its rows. If splits have their own files, only `split` is loaded."""
    # Imported here, because it takes seconds, and code that only scores answers does not need it.
    from datasets import get_dataset_config_names, load_dataset
    from datasets.exceptions import DatasetGenerationError

    path, config = benchmark.hub_id, benchmark.config
    if source is not None:
        # `load_dataset` would look on the Hub for a missing folder.
        if not Path(source).is_dir():
            raise FileNotFoundError(f"source must be an existing folder, got {os.fspath(source)!r}")
        path = os.fspath(Path(source).resolve())
        # A copy of the Hub's repository has the config; a folder with only this set's files does not.
        config = config if config in get_dataset_config_names(path) else None
    try:
        splits: Mapping[str, Any]
        if split in benchmark.own_files and (file := _own_file(path, split, source is None)):
            splits = load_dataset("parquet", data_files={split: file})
        elif benchmark.own_files and source is None:
            splits = dict.fromkeys(benchmark.own_files)
        else:
            splits = load_dataset(path, config)
    except DatasetGenerationError as error:
        raise ValueError(f"{path}: cannot be read ({error.__cause__})") from error
    return splits


def _own_file(path: str, split: str, is_on_hub: bool) -> str | None:
    """The path of a split's Parquet file; None for a folder that holds the split in another form."""
    file = f"{path}/{split}.parquet"
    return f"hf://datasets/{file}" if is_on_hub else file if Path(file).is_file() else None


def _questions(rows: Iterable[dict[str, Any]], parse: RowParser, limit: int | None, where: str) -> list[Question]:
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
        raise ValueError(f"{where}: no row can be used ({reasons or 'there are none'})")
    if left_out:
        logger.warning("%s: rows left out: %d (%s)", where, left_out.total(), reasons)
    return questions
