"""Examine a recipe before hours are spent on it.

    python -m sorl_trl.doctor --config recipe.yaml [what train.py takes] [--num_processes N] [--json]

It reads the recipe as `train.py` does, loads tokenizer and questions but no weights, asks the search engine, and
rehearses a rollout. Exit code: 1 if there is an error, else 0.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Sequence

from sorl_trl.doctor.examine import examine
from sorl_trl.doctor.findings import format_findings, to_json


def main(words: Sequence[str] | None = None) -> int:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # as train.py does
    options, rest = _parser().parse_known_args(words)
    findings = examine(options.config, rest, options.num_processes)
    print(to_json(options.config, findings) if options.json else format_findings(findings))
    return int(any(finding.level == "error" for finding in findings))


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m sorl_trl.doctor",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="RECIPE", help="the recipe, as for train.py")
    parser.add_argument(
        "--num_processes", type=_positive, default=1, metavar="N", help="processes of the training (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a list")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
