"""Build a search index: `python -m sorl_trl.search.index --corpus corpus.jsonl --output index/`."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from tqdm.auto import tqdm

from sorl_trl.command_line import Parser, mistakes, run_command
from sorl_trl.search.engines import ENGINES
from sorl_trl.search.engines.dense import DenseIndex, DenseOptions
from sorl_trl.search.engines.saved import SavedIndex

ABOUT = """\
Builds a search index of a corpus in the folder DIR, for `sorl serve` and for `--index` of `sorl train` and
`sorl evaluate`.

example: sorl index --corpus corpus.jsonl --output index
"""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    with mistakes():
        index = _build(options)
    size = sum(path.stat().st_size for path in options.output.rglob("*") if path.is_file())
    print(f"{len(index):,} passages, {tqdm.format_sizeof(size, 'B')}, in {options.output} ({index.identity})")


def _parser() -> Parser:
    usage = "sorl index --corpus PATH [PATH ...] --output DIR [--engine NAME]"
    parser = Parser(prog="sorl index", usage=usage, description=ABOUT)
    parser.add_argument(
        "--corpus",
        nargs="+",
        required=True,
        metavar="PATH",
        help="JSONL files, with or without gzip, or folders of them; lines as in wiki-18 or MedRAG (required)",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="the folder to make (required)")
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default="bm25",
        metavar="NAME",
        help="bm25 up to about a million passages, tantivy beyond, dense to search by meaning (default: %(default)s)",
    )
    dense = parser.add_argument_group("only for --engine dense")
    defaults = DenseOptions()
    dense.add_argument("--model", help=f"embedding model: a Hub id or a folder (default: {defaults.model})")
    dense.add_argument("--query_prefix", help=f"put before every query (default: {defaults.query_prefix!r})")
    dense.add_argument("--passage_prefix", help=f"put before every passage (default: {defaults.passage_prefix!r})")
    dense.add_argument("--batch_size", type=int, help=f"texts per forward pass (default: {defaults.batch_size})")
    dense.add_argument("--device", help="where the model runs (default: a GPU where there is one)")
    return parser


def _build(options: Namespace) -> SavedIndex:
    names = [field.name for field in fields(DenseOptions)]
    dense = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.engine == DenseIndex.engine:
        return DenseIndex.build(options.corpus, options.output, options=DenseOptions(**dense))
    if dense:
        flags = ", ".join(f"--{name}" for name in dense)
        raise ValueError(f"{flags}: only for --engine dense, got --engine {options.engine}")
    return ENGINES[options.engine].build(options.corpus, options.output)


if __name__ == "__main__":
    sys.exit(run_command(main))
