"""`sorl report RUN… --output report/`: curves and figures of training runs, as one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sorl_trl.command_line import Parser, mistakes

ABOUT = """\
Draws the curves of training runs side by side, with a table of how far each got. It writes DIR/report.html, which
needs no other file. A run that is still training can be read once it has saved a checkpoint.

example: sorl report runs/so_grpo runs/sequence -o report
"""


def main(words: Sequence[str]) -> None:
    usage = "sorl report RUN [RUN ...] [-o DIR]"
    parser = Parser(prog="sorl report", usage=usage, description=ABOUT)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="`output_dir` of a training run")
    where = "folder of the page, made if missing (default: %(default)s)"
    parser.add_argument("-o", "--output", type=Path, default=Path("report"), metavar="DIR", help=where)
    arguments = parser.parse_args(words)
    from sorl_trl.diagnostics.report import write_report  # after `--help`: it takes seconds
    from sorl_trl.diagnostics.runs import load_runs

    with mistakes():
        page = write_report(load_runs(arguments.runs), arguments.output)
    print(f"Page: {page}")
