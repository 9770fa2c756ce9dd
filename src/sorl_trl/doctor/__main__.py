"""Examine a recipe before hours are spent on it.

    python -m sorl_trl.doctor --config recipe.yaml [what train.py takes] [--num_processes N] [--json]

It reads the recipe as `train.py` does, loads tokenizer and questions but no weights, asks the search engine, and
rehearses a rollout. Exit code: 1 if there is an error, 2 if the command line itself is wrong or the file cannot be
read as a recipe, else 0.
"""

from __future__ import annotations

import os
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence

from sorl_trl.command_line import Parser, at_least, mistakes, run_command
from sorl_trl.doctor.examine import examine
from sorl_trl.doctor.findings import format_findings, to_json
from sorl_trl.doctor.reading.recipe_file import read_recipe


def main(words: Sequence[str] | None = None) -> int:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # as train.py does
    options, rest = _parser().parse_known_args(words)
    with mistakes("--config"):
        read_recipe(options.config, rest)  # a file that is no recipe is a mistake on the command line, and no finding
    findings = examine(options.config, rest, options.num_processes)
    print(to_json(options.config, findings) if options.json else format_findings(findings))
    return int(any(finding.level == "error" for finding in findings))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m sorl_trl.doctor",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="RECIPE", help="the recipe, as for train.py")
    parser.add_argument(
        "--num_processes", type=at_least(1), default=1, metavar="N", help="processes of the training (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a list")
    return parser


if __name__ == "__main__":
    sys.exit(run_command(main))
