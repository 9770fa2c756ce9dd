"""How early do the guard's rules fire before a collapse, and how often falsely?

`python -m benchmarks.alarms --runs runs/stability` reads what other benchmarks recorded there, in a minute.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median

from benchmarks.common import RESULTS, Row, table, write_rows
from benchmarks.stability_report import Run
from sorl_trl.command_line import Parser, UserMistake, run_command
from sorl_trl.diagnostics.collapse import DEFAULT_RULES, ITERATION_METRIC, Rule, detect, fall, level, rise

CHOOSING, JUDGING = (401, 405), (402, 403, 404, 406, 407, 408)
_HALF = partial(fall, share=0.5, minimum=0.05)
NAMED = (
    Rule("half_clipped", {"clip_ratio/region_mean": partial(level, threshold=0.5, patience=2)}, ""),
    Rule("gradient_rise", {"grad_norm": partial(rise, factor=2.5)}, ""),
    Rule("echo_trap", {"reward_std": _HALF, "entropy": _HALF, "grad_norm": partial(rise, factor=2.0)}, ""),
)
"""Alarms that the SORL note and RAGEN name."""
NAMES = [rule.name for rule in (*DEFAULT_RULES, *NAMED)]
HEADER = f"""# How early do alarms fire, and how often falsely?

Written by `python -m benchmarks.alarms`: rules read the runs of `runs/stability/` as if a guard had watched. The SORL
note names `half_clipped` (half of the tokens, for two rollouts) and `gradient_rise` (above 2.5 times the median),
RAGEN `echo_trap` (spread of rewards and entropy below half of their best, gradient norm above twice its median).

A run has **collapsed** if its mean sampled exact match over the last five evaluations is below the start's or below
half of its best evaluation: since the first evaluation after the last one that is not.
**Lead**: rollouts from the first alarm to that evaluation, in the median over the collapsed runs that have an alarm;
negative if late, and up to four too long, because only every fifth rollout and the last five are evaluated. Others
have **held** if they end at most .1 below the best run of their regime and seed, else they were **hurt**: only alarms
in runs that held are plainly false. Entropy ends higher than it began in {{}} runs of the first table.

Seeds {", ".join(map(str, CHOOSING))} chose the thresholds of these three and of `harmful_updates`, and the
last row, whose rules fire in time most often, less how often in runs that held. The others judge."""
FATES = ("collapsed", "hurt", "held")


@dataclass(frozen=True)
class Watched:
    """A run, what became of it, and after how many rollouts each rule or pair of rules first fired."""

    run: Run
    fate: str
    first: dict[str, int]

    @property
    def collapsed_at(self) -> int:
        """The rollout of the evaluation since which it has collapsed."""
        evaluations, bar = self.run.record["evaluations"], max(self.run.start, self.run.best / 2)
        scores = [each["sampled_em"] for each in evaluations]
        held = max((i for i, score in enumerate(scores) if score >= bar), default=-1)
        return int(evaluations[min(held + 1, len(evaluations) - 1)]["rollout"])


def first_alarms(log: Sequence[Row]) -> dict[str, int]:
    first: dict[str, int] = {}
    for alarm in detect(log, (*DEFAULT_RULES, *NAMED)):
        first.setdefault(alarm.rule, sum(ITERATION_METRIC in entry for entry in log if entry["step"] < alarm.step))
    for names in combinations(NAMES, 2):
        fired = [first[name] for name in names if name in first]
        first |= {" or ".join(names): min(fired)} if fired else {}
        first |= {" and ".join(names): max(fired)} if len(fired) == 2 else {}
    return first


def watch(folder: Path) -> Iterator[Watched]:
    runs = {path.parent: Run(json.loads(path.read_text())) for path in sorted(folder.glob("*/record.json"))}
    finals = [((run.record["column"], run.record["seed"]), run.final("sampled_em")) for run in runs.values()]
    best = dict(sorted(finals))  # the last of a regime and seed is the highest
    for (path, run), (place, final) in zip(runs.items(), finals, strict=True):
        log = [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]
        fate = "collapsed" if run.collapsed else "held" if final >= best[place] - 0.1 else "hurt"
        yield Watched(run, fate, first_alarms(log))


def summarize(rule: str, watched: Sequence[Watched]) -> Row:
    """In how many runs it fired, and of how many: by what became of them, and by method where they held."""
    counts = {fate: [0, 0] for fate in FATES}
    for each in watched:
        for kind in [each.fate] + [f"held {each.run.record['arm']}"] * (each.fate == "held"):
            fired, runs = counts.get(kind, (0, 0))
            counts[kind] = [fired + (rule in each.first), runs + 1]
    hits = [each for each in watched if each.fate == "collapsed" and rule in each.first]
    return {"rule": rule, "leads": sorted(each.collapsed_at - each.first[rule] for each in hits), **counts}


def gain(row: Row) -> float:
    (_, collapsed), (alarms, held) = row["collapsed"], row["held"]
    return sum(lead >= 0 for lead in row["leads"]) / max(1, collapsed) - alarms / max(1, held)


def as_table(rows: Sequence[Row]) -> str:
    def cells(row: Row) -> Iterator[str]:
        yield f"`{row['rule']}`"
        yield from ("{} of {}".format(*row[fate]) for fate in FATES)
        yield f"{median(row['leads']):g}" if row["leads"] else "–"
        yield ", ".join("{} {} of {}".format(k[5:], *row[k]) for k in row if k[:5] == "held " and row[k][0]) or "–"

    return table(("rule", *FATES, "lead", "held, by method"), map(list, map(cells, rows)))


def main(words: Sequence[str]) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/stability"), help="their folder")
    folder = parser.parse_args(words).runs
    if not (watched := [*watch(folder)]):
        raise UserMistake(f"--runs is {folder}, which has no runs: `python -m benchmarks.stability` makes them")
    chose, judge = ([each for each in watched if each.run.record["seed"] in seeds] for seeds in (CHOOSING, JUDGING))
    pairs = (f"{a} {how} {b}" for a, b in combinations(NAMES, 2) for how in ("or", "and"))
    names = [*NAMES, max(pairs, key=lambda pair: gain(summarize(pair, chose)))]
    judging, choosing = ([summarize(name, of) for name in names] for of in (judge, chose))
    rose = [(each.fate, (curve := each.run.metric("entropy"))[-1:] > curve[:1]) for each in judge]
    said = ", ".join(f"{rose.count((fate, True))} of {sum(of == fate for of, _ in rose)} {fate}" for fate in FATES)
    text = f"{HEADER.format(said)}\n\n{as_table(judging)}\n## On the seeds that chose\n\n{as_table(choosing)}"
    (RESULTS / "alarms.md").write_text(text)
    write_rows([{"judges": row in judging, **row} for row in (*judging, *choosing)], RESULTS / "alarms.json")
    print(f"The report is in {RESULTS / 'alarms.md'}.")


if __name__ == "__main__":
    sys.exit(run_command(main))
