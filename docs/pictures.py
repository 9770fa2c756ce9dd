"""The pictures of the documentation: `python docs/pictures.py` writes docs/pictures/*.svg.

Diagrams are drawn by hand. Plots are of benchmarks/results/*.json, and no number stands here. Each picture is narrow
and on a light ground of its own, so that it can be read on a telephone and in a dark theme.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
WIDTH = 480
INK, PALE, GREY = "#1f2328", "#d0d7de", "#57606a"
BLUE, ORANGE, GREEN, RED = "#0072b2", "#e69f00", "#009e73", "#b3261e"
"""Blue is the policy, orange what the world says or what judges; colour-blind people tell them apart."""

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


def cross(x: float, y: float, size: float = 5) -> str:
    return line(x - size, y - size, x + size, y + size, RED) + line(x - size, y + size, x + size, y - size, RED)


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


def rows_of(regime: str) -> dict[str, dict[str, Any]]:
    """The rows of stability.json, by method."""
    rows = json.loads((ROOT / "benchmarks/results/stability.json").read_text())
    return {row["method"]: row for row in rows if row["regime"] == regime}


def scale(value: float) -> float:
    """Where a share of 0 to 1 is drawn."""
    return 168 + 290 * value


def axis(top: float, bottom: float) -> list[str]:
    drawn = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        drawn += [f'<path d="M{scale(share):g} {top:g}V{bottom:g}" stroke="{PALE}"/>']
        drawn.append(text(scale(share), bottom + 18, f"{share:g}", 13, GREY, "middle"))
    return drawn


COLLAPSES = {
    **{"grpo": "GRPO", "gspo": "GSPO", "so_grpo_specified": "SO-GRPO, note", "grpo_target": "GRPO, target KL"},
    **{"sequence": "sequence", "so_grpo": "SO-GRPO", "ppo": "PPO", "so_ppo": "SO-PPO"},
}


def collapses() -> Picture:
    """A dot is a run; a cross one that collapsed."""
    rows = rows_of("reuse")
    drawn = axis(12, 12 + 30 * len(COLLAPSES))
    for i, (method, name) in enumerate(COLLAPSES.items()):
        row, y = rows[method], 30 + 30 * i
        drawn.append(text(16, y + 5, name, 14, bold=method in ("so_grpo", "so_ppo")))
        drawn.append(line(scale(row["sampled_em"]), y - 10, scale(row["sampled_em"]), y + 10, INK))
        for seed, value in zip(row["seeds"], row["sampled_em_by_seed"], strict=True):
            dot = f'<circle cx="{scale(value):.1f}" cy="{y}" r="5" fill="{BLUE}" fill-opacity="0.7"/>'
            drawn.append(cross(round(scale(value), 1), y) if seed in row["collapsed_seeds"] else dot)
    return 44 + 30 * len(COLLAPSES), drawn


ARMS = {
    "plain": ("GRPO", GREY),
    "gspo_plain": ("GSPO", ORANGE),
    "so_grpo_constant": ("SO-GRPO, target_kl=0", GREEN),
    "so_grpo": ("SO-GRPO", BLUE),
}


def rates() -> Picture:
    """Over learning rates, the mean final exact match of all columns whose search is over."""
    rows = json.loads((ROOT / "benchmarks/results/equal_rates.json").read_text())
    searched = [row for row in rows if row["search"] and len(row["seeds"]) == 3]
    found = {(row["method"], row["learning_rate"], row["regime"]): row["sampled_em"] for row in searched}
    common = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
    columns = [
        column
        for column in dict.fromkeys(row["regime"] for row in searched)
        if all((arm, rate, column) in found for arm in ARMS for rate in common)
    ]

    def at(rate: float) -> float:
        return 56 + 390 * common.index(rate) / (len(common) - 1)

    def height(share: float) -> float:
        return 250 - 230 * share

    drawn = [text(16, 20, f"Final exact match, mean of {len(columns)} ways to drive training hard", 13, GREY)]
    for share in (0.0, 0.25, 0.5, 0.75):
        drawn += [f'<path d="M56 {height(share):g}H446" stroke="{PALE}"/>']
        drawn.append(text(48, height(share) + 5, f"{share:g}", 13, GREY, "end"))
    drawn += [text(at(rate), 270, f"{rate:g}", 13, GREY, "middle") for rate in common]
    drawn.append(text(251, 290, "learning rate", 13, GREY, "middle"))
    for i, (arm, (name, colour)) in enumerate(ARMS.items()):
        ends = [sum(found[arm, rate, column] for column in columns) / len(columns) for rate in common]
        points = [(at(rate), height(end)) for rate, end in zip(common, ends, strict=True)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        drawn.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in points]
        drawn += [rect(64, 166 + 20 * i, 14, 12, colour), text(84, 177 + 20 * i, name, 13)]
    return 304, drawn


def engines() -> Picture:
    """Queries that one core answers in a second."""
    backends = json.loads((ROOT / "benchmarks/results/search.json").read_text())["backends"]
    most = max(each["queries_per_cpu_second"] for each in backends.values())
    drawn = []
    for i, (name, each) in enumerate(backends.items()):
        value, y = each["queries_per_cpu_second"], 16 + 30 * i
        drawn += [text(16, y + 15, name, 14), rect(168, y, 230 * value / most, 20, BLUE)]
        drawn.append(text(174 + 230 * value / most, y + 15, f"{value:,.0f}", 14))
    return 26 + 30 * len(backends), drawn


PICTURES: dict[str, Callable[[], Picture]] = {
    made.__name__: made
    for made in (trajectory, bfcl, rollout, critics, machines, vllm, resume, collapses, rates, engines)
}


def svg(height: int, drawn: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    shape = f'<path d="M0 0L8 4L0 8z" fill="{GREY}"/>'
    size = 'markerWidth="8" markerHeight="8" refX="6" refY="4" markerUnits="userSpaceOnUse"'
    arrow = f'<marker id="arrow" {size} orient="auto">{shape}</marker>'
    ground = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" fill="#f6f8fa" stroke="{PALE}"/>'
    font = 'font-family="system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif"'
    return "\n".join([f"{head} {font}>", f"<defs>{arrow}</defs>", ground, *drawn, "</svg>\n"])


if __name__ == "__main__":
    for name, made in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(svg(*made()), encoding="utf-8")
