"""`sorl report RUN… --output report/`: curves and figures of training runs, as one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sorl_trl.command_line import Parser, mistakes


def main(words: Sequence[str] | None = None) -> None:
    parser = Parser(
        prog="sorl report",
        description="Curves and figures of training runs, side by side, as one HTML page.",
        epilog="A run that is still training can be read once it has saved a checkpoint.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="run", help="its `output_dir`: holds trainer_state.json")
    where = "default: %(default)s"
    parser.add_argument("-o", "--output", type=Path, default=Path("report"), metavar="DIR", help=where)
    arguments = parser.parse_args(words)
    from sorl_trl.diagnostics.report import write_report  # after `--help`: it takes seconds
    from sorl_trl.diagnostics.runs import load_runs

    with mistakes():
        page = write_report(load_runs(arguments.runs), arguments.output)
    print(f"Page: {page}")
