"""A picture of one scripted rollout, in lock-step and event-driven: what search latency costs.

    python -m benchmarks.rollout.picture

64 rows with turns of 10 to 150 tokens, and searches of half a second on average, as `benchmarks.rollout.script` says;
event-driven with a small and with a large `rejoin_after`.
Writes `benchmarks/results/rollout.png`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.rollout.engines import COLLECTED, Collected, Setting
from benchmarks.rollout.script import Cell, Script, ScriptedSearch
from sorl_trl.command_line import Parser, at_least, run_command
from sorl_trl.diagnostics.rollout_picture import draw_rollouts
from sorl_trl.diagnostics.rollout_times import RolloutTimes
from sorl_trl.records.rollout_times import rollout_times

RESULTS = Path(__file__).parents[1] / "results"


def times_of(engine: str, cell: Cell, rejoin_after: int) -> RolloutTimes:
    """Where the time of a rollout of the cell goes."""
    script = Script(cell)
    collected = Collected(Setting(cell, script, ScriptedSearch(script), rejoin_after), COLLECTED[engine])
    collected()
    return rollout_times(collected.collector.timeline)


def main(words: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=at_least(2), default=64, help="default: %(default)s")
    parser.add_argument("--turn-tokens", type=at_least(2), nargs=2, default=(10, 150), help="default: %(default)s")
    parser.add_argument("--search-ms", type=float, default=500.0, help="the mean (default: %(default)s)")
    parser.add_argument("--rejoin-after", type=at_least(0), nargs="+", default=(4, 64), help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=RESULTS / "rollout.png", help="default: %(default)s")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    low, high = arguments.turn_tokens
    cell = Cell(arguments.rows, (low, high), arguments.search_ms)
    drawn = [("lock-step", "lockstep", 0), ("slots, in lock-step", "slots_lockstep", 0)]
    drawn += [(f"slots, rejoin_after={number}", "slots_event", number) for number in arguments.rejoin_after]
    rollouts = {name: times_of(engine, cell, number) for name, engine, number in drawn}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_bytes(draw_rollouts(rollouts))
    print(arguments.output)


if __name__ == "__main__":
    sys.exit(run_command(main))
