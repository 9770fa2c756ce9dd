"""Compare two finished evaluations, question by question: `sorl compare BEFORE AFTER`."""

from __future__ import annotations

from collections.abc import Sequence

from sorl_trl.command_line import Parser, mistakes, refuse

ABOUT = """\
Compares two evaluations on the questions that both asked: means, differences, 95 % intervals and p. It prints a table
and writes nothing.

example: sorl compare runs/quickstart/greedy_before runs/quickstart/policy
"""


def main(words: Sequence[str]) -> None:
    usage = "sorl compare BEFORE AFTER"
    parser = Parser(prog="sorl compare", usage=usage, description=ABOUT)
    about = "the two runs: each the folder that `sorl evaluate` evaluated, or its `--output`"
    parser.add_argument("runs", nargs="*", metavar="RUN", help=about)
    runs = parser.parse_args(words).runs
    if len(runs) != 2:
        refuse(f"`{usage}` compares two runs that `sorl evaluate` has evaluated, got {len(runs)}")
    before, after = runs
    from sorl_trl.evaluation.compare import compare_runs, read_run  # after `--help`: it takes seconds
    from sorl_trl.evaluation.tables import format_comparison

    with mistakes():
        comparisons = compare_runs(read_run(before), read_run(after))
    print(format_comparison(comparisons, before, after))
