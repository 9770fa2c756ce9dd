"""How long the quickstart takes, of one checkout or of several in turn: before a change and after it.

    git worktree add /tmp/before v0.1
    python -m benchmarks.quickstart_time /tmp/before .

Each round runs `quickstart.py` of every checkout, so that the machine's moods meet all of them; a world's policy is
warm-started in the first round and taken from `runs/cache` of the checkout in the others, so that round is left out
where there are several. Seconds of an optimizer step are those of training alone, its rollouts included. Writes
`benchmarks/results/quickstart_time.json` and `quickstart_time.md`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sorl_trl.command_line import Parser, UserMistake, at_least, run_command

RESULTS = Path(__file__).parent / "results"
MEASURES = {"seconds": "the whole quickstart, s", "step_seconds": "an optimizer step, s"}

Round = dict[str, float]


def run_quickstart(checkout: Path, steps: int | None) -> Round:
    """The seconds of one quickstart. Raises UserMistake where it fails, with the last of what it said."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        words = ["--output", f"{folder}/run", *(["--max-steps", str(steps)] if steps else [])]
        command = [sys.executable, str(checkout / "quickstart.py"), *words]
        ended = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        if ended.returncode:
            raise UserMistake(f"the quickstart of {checkout} failed: {ended.stderr.strip()[-500:]}")
        return read_seconds(Path(folder) / "run")


def read_seconds(run: Path) -> Round:
    """What a quickstart that has run says about its time."""
    summary = json.loads((run / "summary.json").read_text())
    state = json.loads((run / "policy" / "trainer_state.json").read_text())
    training = next(entry["train_runtime"] for entry in reversed(state["log_history"]) if "train_runtime" in entry)
    return {"seconds": summary["seconds"], "step_seconds": training / state["global_step"]}


def summarize(rounds: Mapping[str, Sequence[Round]]) -> dict[str, dict[str, Any]]:
    """Per checkout the median of each measure, and its range."""
    result: dict[str, dict[str, Any]] = {}
    for name, measured in rounds.items():
        kept = measured[1:] or measured
        result[name] = {}
        for measure in MEASURES:
            values = [each[measure] for each in kept]
            result[name] |= {measure: statistics.median(values), f"{measure}_range": [min(values), max(values)]}
    return result


def format_table(result: Mapping[str, Mapping[str, Any]], rounds: int) -> str:
    lines = [
        "# How long the quickstart takes",
        "",
        f"`python -m benchmarks.quickstart_time`: medians (lowest to highest) of {rounds} rounds in turn.",
        "",
        f"| checkout | {' | '.join(MEASURES.values())} |",
        "|---|---|---|",
    ]
    for name, row in result.items():
        cells = [_cell(row[measure], *row[f"{measure}_range"]) for measure in MEASURES]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(median: float, low: float, high: float) -> str:
    return f"{median:.3g} ({low:.3g} to {high:.3g})"


def main(words: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkouts", nargs="+", type=Path, help="folders that hold a quickstart.py")
    parser.add_argument("--names", nargs="+", help="what the table calls them; by default their folders' names")
    parser.add_argument("--rounds", type=at_least(1), default=3, help="of each (default: %(default)s)")
    parser.add_argument("--max-steps", type=at_least(1), help="optimizer steps, instead of the recipe's")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the two files (default: %(default)s)")
    arguments = parser.parse_args(words)
    checkouts = [checkout.resolve() for checkout in arguments.checkouts]
    if missing := [str(checkout) for checkout in checkouts if not (checkout / "quickstart.py").is_file()]:
        raise UserMistake(f"{missing[0]} holds no quickstart.py: name a checkout of this repository")
    names = arguments.names or [checkout.name for checkout in checkouts]
    if len(set(names)) != len(checkouts):
        raise UserMistake(f"--names {' '.join(names)}: give each of the {len(checkouts)} checkouts a name of its own")
    rounds: dict[str, list[Round]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name, checkout in zip(names, checkouts, strict=True):
            rounds[name].append(run_quickstart(checkout, arguments.max_steps))
            print(name, rounds[name][-1], flush=True)
    result = summarize(rounds)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "quickstart_time.json").write_text(json.dumps(result, indent=2) + "\n")
    table = format_table(result, arguments.rounds)
    (arguments.output / "quickstart_time.md").write_text(table)
    print(table)


if __name__ == "__main__":
    sys.exit(run_command(main))
