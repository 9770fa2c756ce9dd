"""Compare two finished evaluations, question by question: `sorl compare A B` and `evaluate.py --compare A B`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sorl_trl.command_line import Parser, mistakes
from sorl_trl.evaluation import compare_runs, format_comparison, read_run


@dataclass
class CompareArguments:
    """Two finished runs; the arguments of a run of its own do not go with them."""

    compare: list[str] = field(
        default_factory=list, metadata={"help": "Directories of two finished runs: the difference is B - A."}
    )
    intersection: bool = field(
        default=False, metadata={"help": "With `compare`: compare on the questions that both runs have."}
    )

    def __post_init__(self) -> None:
        if len(self.compare) not in (0, 2):
            raise ValueError(f"`compare` is {self.compare}, but must name two runs.")
        if self.intersection and not self.compare:
            raise ValueError("`intersection` goes with `compare`.")


def run_comparison(arguments: CompareArguments) -> None:
    before, after = arguments.compare
    with mistakes():
        comparisons = compare_runs(read_run(before), read_run(after), arguments.intersection)
    print(format_comparison(comparisons, before, after))


def main(words: Sequence[str] | None = None) -> None:
    parser = Parser(prog="sorl compare", description="The difference B - A of two finished evaluations.")
    parser.add_argument("runs", nargs=2, metavar="RUN", help="its directory: the `--output` of `sorl evaluate`")
    parser.add_argument("--intersection", action="store_true", help="compare on the questions that both runs have")
    options = parser.parse_args(words)
    run_comparison(CompareArguments(options.runs, options.intersection))
