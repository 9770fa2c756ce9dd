"""The pictures of the documentation: `python docs/pictures.py` writes docs/pictures/*.svg.

Diagrams are drawn by hand. Plots are of benchmarks/results/*.json, and of docs/pictures/quickstart.json, which
`python docs/pictures.py quickstart=runs/quickstart/policy` takes from the log of that run. No number stands here.
Each picture is narrow and on a light ground of its own, so that it can be read on a telephone and in a dark theme.

The screenshots beside them, view.png and training_view.png, are of pages that `sorl view` writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
WIDTH = 480
INK, PALE, GREY = "#1f2328", "#d0d7de", "#57606a"
BLUE, ORANGE, GREEN, RED = "#0072b2", "#e69f00", "#009e73", "#b3261e"
BROWN = "#9a5b00"
"""Blue is the policy, orange what the world says or what judges; colour-blind people tell them apart. Brown is an
orange in which a name can be read."""

Picture = tuple[int, list[str]]
"""Its height, and what is on it."""


def text(
    x: float, y: float, words: str, size: int = 15, fill: str = INK, anchor: str = "start", bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    look = f'font-size="{size}" fill="{fill}" text-anchor="{anchor}"{weight}'
    return f'<text x="{x:g}" y="{y:g}" {look}>{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> str:
    at = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {at} rx="4" fill="{fill}" stroke="{stroke}"/>'


def box(x: float, y: float, width: float, height: float, fill: str, *lines: str) -> str:
    """A filled box with lines of text in its middle."""
    ink = "#ffffff" if fill in (BLUE, GREEN, GREY) else INK
    top = y + height / 2 - 9 * (len(lines) - 1) + 5
    said = [text(x + width / 2, top + 18 * i, line, 14, ink, "middle") for i, line in enumerate(lines)]
    return "".join([rect(x, y, width, height, fill), *said])


def line(
    x1: float, y1: float, x2: float, y2: float, stroke: str = GREY, dashed: bool = False, arrow: bool = False
) -> str:
    extra = (' stroke-dasharray="4 4"' if dashed else "") + (' marker-end="url(#arrow)"' if arrow else "")
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{stroke}" stroke-width="2"{extra}/>'


@dataclass(frozen=True)
class Plot:
    """Axes whose corners are given in pixels and in data; curves are named at their right end."""

    left: float
    top: float
    right: float
    bottom: float
    xs: tuple[float, float]
    ys: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.xs
        return self.left + (self.right - self.left) * (value - low) / (high - low)

    def y(self, value: float) -> float:
        low, high = self.ys
        return self.bottom - (self.bottom - self.top) * (value - low) / (high - low)

    def grid(self, ys: Iterable[float], xs: Mapping[float, str]) -> list[str]:
        drawn = []
        for value in ys:
            drawn.append(f'<path d="M{self.left:g} {self.y(value):.1f}H{self.right:g}" stroke="{PALE}"/>')
            drawn.append(text(self.left - 8, round(self.y(value) + 5, 1), f"{value:g}", 13, GREY, "end"))
        return drawn + [
            text(round(self.x(at), 1), self.bottom + 18, name, 13, GREY, "middle") for at, name in xs.items()
        ]

    def curve(self, points: Iterable[tuple[float, float]], colour: str, pale: bool = False) -> str:
        path = "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)
        width, opacity = (1.2, 0.3) if pale else (2.5, 1)
        look = f'stroke="{colour}" stroke-width="{width}" stroke-opacity="{opacity}" stroke-linejoin="round"'
        return f'<path d="M{path}" fill="none" {look}/>'

    def names(self, ends: Mapping[str, tuple[float, str]], gap: float = 18) -> list[str]:
        """The name of each curve beside its last value, in its colour, moved where two would overlap."""
        order = sorted(ends, key=lambda name: self.y(ends[name][0]))
        places = [self.y(ends[name][0]) for name in order]
        for i in range(1, len(places)):
            places[i] = max(places[i], places[i - 1] + gap)
        for i in reversed(range(len(places))):
            places[i] = min(places[i], self.bottom - gap * (len(places) - 1 - i))
        drawn = []
        for name, place in zip(order, places, strict=True):
            value, colour = ends[name]
            leader = f"M{self.right + 3:g} {self.y(value):.1f}L{self.right + 14:g} {place:.1f}"
            drawn.append(f'<path d="{leader}" stroke="{colour}"/>')
            drawn.append(text(self.right + 18, round(place + 5, 1), name, 13, colour, bold=True))
        return drawn


def cross(x: float, y: float, size: float = 5) -> str:
    return line(x - size, y - size, x + size, y + size, RED) + line(x - size, y + size, x + size, y - size, RED)


def architecture() -> Picture:
    drawn = list[str]()
    for title, where, y, height in (
        ("rollout", "rollout/, endpoint/", 16, 126),
        ("trajectories", "trainers/rewards.py", 166, 96),
        ("batch", "trainers/pack.py", 286, 74),
        ("loss", "trainers/loss.py", 384, 74),
    ):
        drawn += [rect(16, y, 408, height, "#ffffff", GREY), text(28, y + 24, title, bold=True)]
        drawn.append(text(412, y + 24, where, 13, GREY, "end"))
        if title != "loss":
            drawn.append(line(220, y + height, 220, y + height + 20, arrow=True))
    drawn += [box(28, 52, 136, 78, BLUE, "engine", "slots, generate", "or vLLM")]
    drawn += [box(276, 52, 136, 78, ORANGE, "tools, search", "or your agent")]
    drawn += [line(166, 78, 272, 78, arrow=True), text(220, 70, "turn", 14, GREY, "middle")]
    drawn += [line(274, 106, 168, 106, arrow=True), text(220, 124, "observation", 14, GREY, "middle")]
    for i, (reward, *parts) in enumerate(((1, 70, 60, 80), (0, 50, 70, 50), (1, 60, 40, 90))):
        x, y = 84, 202 + 18 * i
        drawn.append(rect(28, y, 54, 13, PALE))
        for part, width in enumerate(parts):
            drawn.append(rect(x, y, width, 13, ORANGE if part % 2 else BLUE))
            x += width + 2
        drawn.append(text(412, y + 12, f"reward {reward}", 14, GREEN if reward else RED, "end"))
    drawn.append(text(28, 334, "token ids, turn ids, log-probabilities, advantages", 14))
    drawn.append(text(28, 351, "in micro-batches; several updates of each rollout", 13, GREY))
    drawn.append(text(28, 432, "one ratio per turn, clipped; the method's penalty", 14))
    drawn.append(text(28, 449, "gradient, optimizer step, learning rate from the KL", 13, GREY))
    corner = f'd="M424 421H446V91H428" fill="none" stroke="{GREY}" stroke-width="2" marker-end="url(#arrow)"'
    drawn.append(f"<path {corner}/>")
    weights = text(0, 0, "new weights", 14, GREY, "middle")
    return 474, [*drawn, f'<g transform="translate(464 256) rotate(-90)">{weights}</g>']


def trajectory() -> Picture:
    parts = [(16, 84, PALE, "prompt", "question"), (104, 112, BLUE, "turn 0", "<search>…")]
    parts += [(220, 128, ORANGE, "observation", "<information>…"), (352, 112, BLUE, "turn 1", "<answer>…")]
    drawn = [box(x, 16, width, 52, fill, *lines) for x, width, fill, *lines in parts]
    turns = (104, 352)
    drawn.append(text(16, 98, "One importance ratio for each …", bold=True))
    drawn.append(text(16, 128, "token"))
    drawn += [rect(x + 19 * i, 115, 16, 18, BLUE) for x in turns for i in range(6)]
    drawn.append(text(16, 160, "turn", bold=True))
    drawn += [rect(x, 147, 112, 18, BLUE) for x in turns]
    drawn.append(text(284, 161, "the default", 14, GREY, "middle"))
    drawn.append(text(16, 192, "sequence"))
    drawn += [rect(x, 179, 112, 18, BLUE) for x in turns] + [line(216, 188, 352, 188, BLUE, dashed=True)]
    drawn.append(text(16, 228, "Blue is trained on. Prompt and observations are only read.", 14, GREY))
    return 244, drawn


def bfcl() -> Picture:
    said = [
        (GREY, "user", "“Put the notes into the archive.”"),
        (BLUE, "policy", "[cd(folder='docs'), mv('notes', 'archive')]"),
        (ORANGE, "worlds", '{"result": "\'notes\' moved to …"}'),
        (BLUE, "policy", "“Done.”"),
        (GREY, "user", "“And how many lines do they have?”"),
        (BLUE, "policy", "[cd(folder='archive'), wc('notes')]"),
    ]
    drawn = []
    for i, (fill, who, words) in enumerate(said):
        drawn += [box(16, 16 + 38 * i, 68, 30, fill, who), text(96, 36 + 38 * i, words, 14)]
        if words == "“Done.”":
            drawn.append(text(464, 36 + 38 * i, "check, reward", 14, GREEN, "end", bold=True))
    drawn.append(text(16, 262, "Blue messages are the turns that are trained on.", 14, GREY))
    return 276, drawn


def rollout() -> Picture:
    def row(y: float, *spans: tuple[float, float, str]) -> list[str]:
        return [rect(16 + 1.7 * start, y, 1.7 * (end - start) - 2, 18, fill) for start, end, fill in spans]

    def end(y: float, at: float) -> str:
        return line(16 + 1.7 * at, y, 16 + 1.7 * at, y + 76, INK, dashed=True)

    turns, replies = {"a": 60, "b": 100, "c": 40}, {"a": 30, "b": 50, "c": 30}
    last = {"a": 80, "b": 40, "c": 100}
    drawn = [text(16, 28, "TRL's loop: each waits for the slowest", bold=True)]
    for i, name in enumerate(turns):
        spans = ((0, turns[name], BLUE), (100, 100 + replies[name], ORANGE), (150, 150 + last[name], BLUE))
        drawn += row(42 + 24 * i, *spans)
    drawn += [end(40, 250), text(16, 148, "Here: a turn that has ended is answered at once", bold=True)]
    for i, (name, turn) in enumerate(turns.items()):
        back = turn + 50
        drawn += row(
            162 + 24 * i, (0, turn, BLUE), (turn, turn + replies[name], ORANGE), (back, back + last[name], BLUE)
        )
    drawn += [end(160, 190), rect(16, 250, 18, 14, BLUE), text(40, 262, "writes", 14, GREY)]
    drawn += [rect(106, 250, 18, 14, ORANGE), text(130, 262, "is searched for", 14, GREY)]
    return 278, [*drawn, text(252, 262, "gap: waits", 14, GREY)]


def critics() -> Picture:
    drawn = [
        text(16 + 156 * i + 68, 28, name, 15, INK, "middle", True)
        for i, name in enumerate(("adapter", "head", "model"))
    ]
    drawn += [box(16, 150, 136, 44, PALE, "base, frozen"), box(16, 100, 66, 46, BLUE, "policy", "LoRA")]
    drawn += [box(86, 100, 66, 46, ORANGE, "critic", "LoRA"), box(86, 52, 66, 44, ORANGE, "head, V")]
    drawn += [box(172, 100, 136, 94, BLUE, "policy"), box(242, 52, 66, 44, ORANGE, "head, V")]
    drawn += [box(328, 100, 66, 94, BLUE, "policy"), box(398, 100, 66, 94, ORANGE, "value", "model")]
    drawn += [box(398, 52, 66, 44, ORANGE, "head, V")]
    return 212, drawn


def machines() -> Picture:
    drawn = []
    for i, x in enumerate((16, 256)):
        drawn += [rect(x, 16, 208, 112, "#ffffff", GREY), text(x + 12, 40, f"machine {i}", bold=True)]
        drawn.append(text(x + 12, 62, "a process for each GPU", 14, GREY))
        drawn += [box(x + 12 + 24 * gpu, 78, 20, 34, BLUE, str(8 * i + gpu)) for gpu in range(8)]
        drawn.append(line(x + 104, 128, x + 104, 168))
    drawn += [line(224, 95, 256, 95, BLUE), text(240, 148, "NCCL", 14, GREY, "middle"), line(88, 168, 392, 168)]
    for x, lines in (
        (16, ("search", "server")),
        (168, ("vLLM server,", "if wanted")),
        (320, ("shared", "output folder")),
    ):
        drawn += [line(x + 72, 168, x + 72, 196, arrow=True), box(x, 200, 144, 52, ORANGE, *lines)]
    return 268, drawn


def vllm() -> Picture:
    drawn = [
        text(16, 28, "colocate", bold=True),
        rect(16, 40, 448, 76, "#ffffff", GREY),
        text(28, 62, "each GPU", 14, GREY),
    ]
    drawn += [box(28, 72, 130, 36, BLUE, "trainer"), box(322, 72, 130, 36, ORANGE, "vLLM")]
    drawn += [line(158, 90, 318, 90, arrow=True), text(240, 82, "weights, in memory", 14, GREY, "middle")]
    drawn += [text(16, 150, "server", bold=True)]
    drawn += [rect(x, 162, 154, 92, "#ffffff", GREY) for x in (16, 310)]
    drawn += [text(28, 184, "training GPUs", 14, GREY), text(322, 184, "its own GPUs", 14, GREY)]
    drawn += [box(28, 194, 130, 48, BLUE, "trainer"), box(322, 194, 130, 48, ORANGE, "vLLM")]
    drawn += [line(170, 208, 306, 208, arrow=True), text(240, 200, "weights, NCCL", 14, GREY, "middle")]
    drawn += [line(306, 232, 174, 232, arrow=True), text(240, 250, "turns, HTTP", 14, GREY, "middle")]
    return 270, drawn


def resume() -> Picture:
    def at(step: float) -> float:
        return 24 + 4.1 * step

    drawn = [text(16, 28, "The first command", bold=True), line(at(0), 52, at(73), 52, BLUE)]
    drawn += [cross(at(73), 52, size=7), text(at(73), 80, "stopped at 73", 14, RED, "middle")]
    drawn += [
        text(16, 118, "The second, with --resume_from_checkpoint latest", bold=True),
        line(at(50), 142, at(104), 142, BLUE, arrow=True),
    ]
    for step, y in ((50, 52), (50, 142), (100, 142)):
        drawn.append(f'<circle cx="{at(step):g}" cy="{y}" r="7" fill="{ORANGE}" stroke="{INK}"/>')
    drawn += [
        line(at(50), 60, at(50), 98, ORANGE, dashed=True),
        text(at(50) - 12, 80, "checkpoint-50", 14, GREY, "end"),
    ]
    drawn.append(text(at(100), 170, "checkpoint-100", 14, GREY, "end"))
    return 188, [*drawn, text(16, 170, "Steps 51 to 73 come out the same.", 14, GREY)]


def rows_of(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    return rows


STABILITY = {
    "sequence": ("sequence of 0.3", GREEN),
    "grpo_target": ("GRPO + target KL", BROWN),
    "so_grpo_03": ("SO-GRPO of 0.3", GREY),
    "so_grpo": ("SO-GRPO", BLUE),
}


def stability() -> Picture:
    """A row for each column of the study: the mean score of each arm, and of the policies before training."""
    lines = (ROOT / "benchmarks/results/stability.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["seed"] > 400 and row["arm"] in STABILITY]
    columns = [name for name in TITLES if any(row["column"] == name for row in rows)]
    bottom = 46 + 24 * len(columns)
    plot = Plot(196, 46, 458, bottom, (0, 1), (0, 1))
    drawn = [text(16, 26, "Exact match in an unseen world, mean of eight seeds", 14, bold=True)]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        drawn.append(f'<path d="M{plot.x(share):g} 40V{bottom}" stroke="{PALE}"/>')
        drawn.append(text(plot.x(share), bottom + 18, f"{share:g}", 13, GREY, "middle"))
    for i, column in enumerate(columns):
        y, of = 58 + 24 * i, [row for row in rows if row["column"] == column]
        drawn.append(text(16, y + 5, TITLES[column], 14))
        start = plot.x(fmean(row["start"] for row in of))
        drawn.append(line(start, y - 8, start, y + 8, INK))
        for arm, (_, colour) in STABILITY.items():
            scores = [row["score"] for row in of if row["arm"] == arm]
            if scores:
                drawn.append(f'<circle cx="{plot.x(fmean(scores)):.1f}" cy="{y}" r="5.5" fill="{colour}"/>')
    for i, (name, colour) in enumerate(STABILITY.values()):
        x, y = 24 + 220 * (i % 2), bottom + 44 + 22 * (i // 2)
        drawn += [f'<circle cx="{x}" cy="{y - 5}" r="5.5" fill="{colour}"/>', text(x + 12, y, name, 13)]
    y = bottom + 88
    return y + 14, [*drawn, line(24, y - 13, 24, y + 3, INK), text(36, y, "before training", 13)]


TITLES = {
    **{"reuse": "32 updates", "long": "more searches", "hot": "high rate", "stale": "late", "hunt-reuse": "hunts"},
    **{"turns-of-40": "turns of 40", "turns-of-40-times-3": "… rate × 3", "turns-of-80": "turns of 80"},
    **{"turns-of-80-times-3": "… rate × 3", "bfloat16": "… bfloat16", "turns-of-200": "turns of 200"},
    **{"turns-of-200-times-3": "… rate × 3", "sampler-noise": "router noise", "sampler-bfloat16": "bfloat16 sampler"},
}
"""Of the columns, those of long turns beside each other."""


REWARDS = {
    "grpo": ("GRPO", GREY),
    "gspo": ("GSPO", BROWN),
    "so_grpo": ("SO-GRPO", BLUE),
    "sequence": ("sequence", GREEN),
}


def real_model() -> Picture:
    """The mean reward of each rollout, of the methods that several seeds judged; pale: each of these."""
    drawn = list[str]()
    for i, (regime, title) in enumerate(
        {"many_updates": "24 updates of each rollout", "late": "late rollouts"}.items()
    ):
        rows = [row for row in rows_of("nine_methods") if row["regime"] == regime and row["judging"]]
        last = len(rows[0]["rollout_rewards"])
        plot = Plot(52, 42 + 236 * i, 374, 210 + 236 * i, (1, last), (0, 1))
        drawn.append(text(16, plot.top - 16, f"Mean reward, {title}", 14, bold=True))
        drawn += plot.grid((0.0, 0.25, 0.5, 0.75, 1.0), {at: str(at) for at in range(1, last + 1)})
        ends = {}
        for method, (name, colour) in REWARDS.items():
            runs = [row["rollout_rewards"] for row in rows if row["method"] == method]
            means = [fmean(each) for each in zip(*runs, strict=True)]
            drawn += [plot.curve(enumerate(run, 1), colour, pale=True) for run in runs]
            drawn.append(plot.curve(enumerate(means, 1), colour))
            ends[name] = means[-1], colour
        drawn += plot.names(ends)
    return 494, [*drawn, text(213, 484, "rollout; pale: each seed", 13, GREY, "middle")]


KEPT = ("step", "reward")


def logged(name: str, metric: str) -> list[tuple[int, float]]:
    log = json.loads((FOLDER / f"{name}.json").read_text())["log"]
    return [(entry["step"], entry[metric]) for entry in log if metric in entry]


def keep_log(name: str, run: Path) -> None:
    """Write what the curves of a run need beside its picture."""
    log = json.loads((run / "trainer_state.json").read_text())["log_history"]
    rows = [{key: entry[key] for key in KEPT if entry.get(key) is not None} for entry in log if "step" in entry]
    entries = ",\n".join(f"  {json.dumps(row)}" for row in rows if len(row) > 1)
    (FOLDER / f"{name}.json").write_text(f'{{"source": "{run}",\n "log": [\n{entries}\n]}}\n', encoding="utf-8")


def rewards_of(name: str, plot: Plot, colour: str = BLUE) -> list[str]:
    """The reward of each rollout, pale, and its mean over five."""
    points = logged(name, "reward")
    means = [
        (step, fmean(reward for _, reward in points[max(0, i - 4) : i + 1])) for i, (step, _) in enumerate(points)
    ]
    return [plot.curve(points, colour, pale=True), plot.curve(means, colour)]


def quickstart() -> Picture:
    last = logged("quickstart", "reward")[-1][0]
    plot = Plot(48, 44, 464, 200, (0, last), (0, 1))
    drawn = [text(16, 26, "Exact match of sampled answers in training", 14, bold=True)]
    drawn += plot.grid((0.0, 0.25, 0.5, 0.75, 1.0), {at: str(at) for at in range(0, last + 1, 50)})
    drawn += rewards_of("quickstart", plot)
    return 252, [*drawn, text(256, 240, "optimizer step; pale: each rollout, thick: mean of five", 13, GREY, "middle")]


def language_model() -> Picture:
    """Reward of each rollout, and the learning rate of each update; pale: each seed."""
    lines = (ROOT / "benchmarks/results/verdict.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if (row["column"], row["arm"]) == ("short", "so_grpo")]
    factors = [[rate / row["rate"] for rate in row["rates"]] for row in rows]
    rollouts, updates = len(rows[0]["reward"]), len(factors[0])
    each = updates // rollouts
    drawn = list[str]()
    for i, (title, of) in enumerate(
        (
            ("reward", [row["reward"] for row in rows]),
            ("lr_factor, the share of the learning rate", factors),
        )
    ):
        step = updates // len(of[0])
        plot = Plot(48, 40 + 156 * i, 464, 140 + 156 * i, (0, updates), (0, 1))
        drawn.append(text(16, plot.top - 14, title, 14, bold=True))
        drawn += plot.grid((0.0, 0.5, 1.0), {at * each: str(at * each) for at in range(rollouts + 1)})
        ats = [step * at for at in range(len(of[0]))]
        drawn += [plot.curve(zip(ats, values, strict=True), BLUE, pale=True) for values in of]
        drawn.append(plot.curve(zip(ats, map(fmean, zip(*of, strict=True)), strict=True), BLUE))
    about = f"update, {each} of each rollout; pale: each of {len(rows)} seeds, thick: mean"
    return 348, [*drawn, text(250, 336, about, 13, GREY, "middle")]


TIMELINES = {
    (0, "dataset", False): "synchronous",
    (2, "dataset", False): "async_staleness=2",
    (2, "completed", True): "async_order=completed, some searches slow",
}
"""Cases of `benchmarks.async_speed`: staleness, order, stragglers."""


def lanes_of(spans: Iterable[Sequence[float]]) -> list[tuple[int, float, float]]:
    """Each span with a lane in which it overlaps no other."""
    free, placed = list[float](), []
    for start, end in sorted(map(tuple, spans)):
        lane = next((i for i, until in enumerate(free) if until <= start), len(free))
        free[lane : lane + 1] = [end]
        placed.append((lane, start, end))
    return placed


def asynchronous() -> Picture:
    """What samples, trains and waits over time, in the last run of three cases."""
    rows = {(row["staleness"], row["order"], row["stragglers"]): row for row in rows_of("async") if "spans" in row}
    seconds = max(rows[case]["wall_seconds"] for case in TIMELINES)

    def bars(y: float, height: float, spans: Iterable[Sequence[float]], fill: str) -> list[str]:
        at, scale = 72, 392 / seconds
        return [
            f'<rect x="{at + scale * start:.1f}" y="{y:g}" width="{scale * (end - start) - 0.6:.1f}" '
            f'height="{height:g}" fill="{fill}"/>'
            for start, end in spans
            if scale * (end - start) > 0.8
        ]

    drawn, y = list[str](), 12.0
    for case, title in TIMELINES.items():
        spans = rows[case]["spans"]
        stood = spans["waits"] if case[0] else spans["samples"]
        # A training step begins with its rollout, or by waiting for it.
        trains = [(max([start, *(e for s, e in stood if start <= s <= end)]), end) for start, end in spans["trains"]]
        drawn.append(text(16, y + 14, title, 14, bold=True))
        y += 26
        lanes = lanes_of(spans["samples"])
        count = 1 + max(lane for lane, _, _ in lanes)
        height = 12 if count < 4 else 6
        for lane, start, end in lanes:
            drawn += bars(y + (height + 1) * lane, height, [(start, end)], ORANGE)
        drawn.append(text(16, y + (height + 1) * count / 2 + 4, "samples", 13, GREY))
        y += (height + 1) * count + 5
        drawn += [*bars(y, 12, trains, BLUE), text(16, y + 11, "trains", 13, GREY)]
        y += 18
        if case[0]:
            drawn += [*bars(y, 12, spans["waits"], RED), text(16, y + 11, "waits", 13, GREY)]
            y += 18
        y += 10
    for at in range(0, int(seconds) + 1, 20):
        drawn.append(text(72 + 392 * at / seconds, y + 8, f"{at} s", 13, GREY, "middle"))
    return int(y) + 20, drawn


PICTURES: tuple[Callable[[], Picture], ...] = (
    *(architecture, trajectory, bfcl, rollout, critics, machines, vllm, resume),
    *(stability, real_model, quickstart, language_model, asynchronous),
)


def svg(height: int, drawn: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    shape = f'<path d="M0 0L8 4L0 8z" fill="{GREY}"/>'
    size = 'markerWidth="8" markerHeight="8" refX="6" refY="4" markerUnits="userSpaceOnUse"'
    arrow = f'<marker id="arrow" {size} orient="auto">{shape}</marker>'
    ground = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" fill="#f6f8fa" stroke="{PALE}"/>'
    font = 'font-family="system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif"'
    return "\n".join([f"{head} {font}>", f"<defs>{arrow}</defs>", ground, *drawn, "</svg>\n"])


if __name__ == "__main__":
    for name, _, run in (word.partition("=") for word in sys.argv[1:]):
        keep_log(name, Path(run))
    for made in PICTURES:
        (FOLDER / f"{made.__name__}.svg").write_text(svg(*made()), encoding="utf-8")
