"""Public question sets as JSONL files, for `train_questions`, `eval_questions` and `sorl evaluate --questions`.

python examples/public_questions.py nq hotpotqa

This writes each split that has answers to a file, such as data/nq_test.jsonl, from the Hub or, with `--source FOLDER`,
from files in the set's own schema that are named after their splits, such as FOLDER/nq/test.jsonl.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from datasets import load_dataset

from sorl_trl.qa import Question, write_questions
from sorl_trl.qa.questions import text

Row = Mapping[str, Any]
FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def flashrag(row: Row) -> Question:
    """FlashRAG: `id, question, golden_answers, metadata`. No answer could match a blank one, so it is left out."""
    answers = tuple(answer for answer in row["golden_answers"] or () if answer.strip())
    if not answers:
        raise ValueError("`golden_answers` is empty")
    about = row.get("metadata") or {}
    return Question(str(row["id"]), read(row, "question"), answers, about, data_source=row["data_source"])


def search_r1(row: Row) -> Question:
    """Search-R1: FlashRAG's columns among others. It joins sets with equal ids, so each gets its set's name."""
    return flashrag({**row, "id": f"{row['data_source']}-{row['id']}"})


def medqa(row: Row) -> Question:
    """MedQA: `question, options {A…}, answer_idx`, a letter."""
    options = {letter: read(row["options"], letter) for letter, each in row["options"].items() if each is not None}
    return choice(row, options, options[row["answer_idx"]], "answer_idx")


def medmcqa(row: Row) -> Question:
    """MedMCQA: `question, opa, opb, opc, opd, cop`. `cop` counts from 0; it is -1 or None without a label."""
    columns = ("opa", "opb", "opc", "opd")
    if row["cop"] not in range(len(columns)):
        raise ValueError("`cop` is not a label")
    options = {letter: read(row, column) for letter, column in zip("ABCD", columns, strict=True)}
    return choice(row, options, options["ABCD"[row["cop"]]], "cop", *columns)


def pubmedqa(row: Row) -> Question:
    """PubMedQA: `pubid, question, final_decision`. The abstract in `context` is not shown: the agent should search."""
    options = {"A": "yes", "B": "no", "C": "maybe"}
    return choice({**row, "id": row["pubid"]}, options, read(row, "final_decision"), "pubid", "final_decision")


def choice(row: Row, options: Mapping[str, str], right: str, *used: str) -> Question:
    """A multiple-choice question with the text of its right option; columns not `used` become metadata."""
    if list(options.values()).count(right) != 1:
        raise ValueError("not exactly one option is right")
    known = {"id", "question", "options", "data_source", *used}
    about = {name: value for name, value in row.items() if name not in known}
    return Question(str(row["id"]), read(row, "question"), (right,), about, options, row["data_source"])


def read(row: Row, name: str) -> str:
    if row[name] is None:
        raise ValueError(f"`{name}` is missing")
    return text(name, row[name]).strip()


class PublicSet(NamedTuple):
    hub_id: str
    config: str | None
    parse: Callable[[Row], Question]
    """Makes a question of a row, or raises ValueError if the row has no clear answer."""
    files: tuple[str, ...] = ()
    """Splits in Parquet files with different columns, which `datasets` can only read one by one."""


FLASHRAG = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
SETS = {name: PublicSet("RUC-NLPIR/FlashRAG_datasets", name, flashrag) for name in FLASHRAG}
SETS |= {
    # The training splits of nq and hotpotqa; the evaluation splits of all seven.
    "search_r1": PublicSet("PeterJinGo/nq_hotpotqa_train", None, search_r1, ("train", "test")),
    "medqa": PublicSet("GBaker/MedQA-USMLE-4-options", None, medqa),
    "medmcqa": PublicSet("openlifescienceai/medmcqa", None, medmcqa),
    "pubmedqa": PublicSet("qiaojin/PubMedQA", "pqa_labeled", pubmedqa),
}


def splits_of(name: str, source: Path | None) -> Mapping[str, Iterable[Row]]:
    """The rows of a set, by split."""
    hub_id, config, _, files = SETS[name]
    paths = {split: (".parquet", f"hf://datasets/{hub_id}/{split}.parquet") for split in files}
    if source is not None:
        paths = {path.stem: (path.suffix, str(path)) for path in sorted((source / name).iterdir())}
    elif not files:
        return load_dataset(hub_id, config)
    return {
        split: load_dataset(FORMATS[suffix], data_files=path, split="train") for split, (suffix, path) in paths.items()
    }


def questions_of(name: str, split: str, rows: Iterable[Row]) -> list[Question]:
    """The questions of a split. It prints how many rows are left out, and why."""
    questions: list[Question] = []
    left_out: Counter[str] = Counter()
    for number, row in enumerate(rows):
        try:
            questions.append(SETS[name].parse({"id": f"{split}_{number}", "data_source": name, **row}))
        except ValueError as reason:
            left_out[str(reason)] += 1
    reasons = "".join(f"; left out {count}: {reason}" for reason, count in left_out.most_common(5))
    print(f"{name}, {split}: {len(questions):,} questions{reasons}")
    return questions


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="+", choices=SETS, metavar="NAME", help=", ".join(SETS))
    parser.add_argument("--source", type=Path, metavar="FOLDER", help="has a folder per set (default: the Hub)")
    parser.add_argument("--output", type=Path, default=Path("data"), metavar="FOLDER", help="(default: data)")
    arguments = parser.parse_args(words)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in arguments.names:
        for split, rows in splits_of(name, arguments.source).items():
            if questions := questions_of(name, split, rows):
                write_questions(questions, arguments.output / f"{name}_{split}.jsonl")


if __name__ == "__main__":
    main()
