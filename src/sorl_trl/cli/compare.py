"""Compare two finished evaluations, question by question: `sorl compare A B`."""

from __future__ import annotations

from collections.abc import Sequence

from sorl_trl.command_line import Parser, mistakes


def main(words: Sequence[str] | None = None) -> None:
    parser = Parser(prog="sorl compare", description="The difference B - A of two finished evaluations.")
    parser.add_argument("runs", nargs=2, metavar="RUN", help="what `sorl evaluate` evaluated, or its `--output`")
    before, after = parser.parse_args(words).runs
    from sorl_trl.evaluation.compare import compare_runs, read_run  # after `--help`: it takes seconds
    from sorl_trl.evaluation.tables import format_comparison

    with mistakes():
        comparisons = compare_runs(read_run(before), read_run(after))
    print(format_comparison(comparisons, before, after))
