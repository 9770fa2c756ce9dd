"""Compare two finished evaluations, question by question: `sorl compare BEFORE AFTER`."""

from __future__ import annotations

from collections.abc import Sequence

from sorl_trl.command_line import Parser, mistakes

ABOUT = """\
Compares two evaluations on the questions that both asked: means, differences, 95 % intervals and p. It prints a table
and writes nothing.

example: sorl compare runs/quickstart/greedy_before runs/quickstart/policy
"""


def main(words: Sequence[str]) -> None:
    parser = Parser(prog="sorl compare", usage="sorl compare BEFORE AFTER", description=ABOUT)
    parser.add_argument(
        "before", metavar="BEFORE", help="the folder that `sorl evaluate` evaluated, or its `--output`"
    )
    parser.add_argument("after", metavar="AFTER", help="the same of the other run")
    arguments = parser.parse_args(words)
    from sorl_trl.evaluation.compare import compare_runs, read_run  # after `--help`: it takes seconds
    from sorl_trl.evaluation.tables import format_comparison

    with mistakes():
        comparisons = compare_runs(read_run(arguments.before), read_run(arguments.after))
    print(format_comparison(comparisons, arguments.before, arguments.after))
