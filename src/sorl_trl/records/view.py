"""The page of `sorl view RUN`: one HTML file with style, scripts and data. It loads nothing else.

Its data are notes and one entry per trajectory of an evaluation or of training.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files
from itertools import groupby, islice
from pathlib import Path
from string import Template
from typing import Any

from sorl_trl.command_line import Parser, at_least, mistakes, sorl_command
from sorl_trl.files import check_run_folder, write_whole
from sorl_trl.records import policy_in
from sorl_trl.records.evaluated import (
    MEASURES,
    RESULTS,
    SETTINGS,
    count_evaluated,
    evaluation_in,
    read_evaluated,
    read_settings,
    why_stale,
)
from sorl_trl.records.trained import SHARDS, TrainedTrajectory, count_trained, read_trained

ABOUT = """\
Writes the trajectories of a training run or an evaluation into one HTML page, for filtering and reading. The page
needs no server and no network. If a run has both, RUN shows training and RUN/evaluation the evaluation.

example: sorl view runs/quickstart/policy -o page.html
"""
LIMIT = 1000
"""Default of `--limit`, our choice: 1,000 trajectories of 1,000 tokens take 33 MB, which browsers open in seconds."""
STYLE = "view.css"
SCRIPTS = ("view_text.js", "view_groups.js", "view_trajectory.js", "view_list.js")


def main(words: Sequence[str]) -> None:
    usage = "sorl view RUN [-o FILE] [--limit N]"
    parser = Parser(prog="sorl view", usage=usage, description=ABOUT)
    kinds = (
        "`output_dir` of training with `save_trajectories_steps`; or a folder that `sorl evaluate` evaluated, or its "
        "output"
    )
    parser.add_argument("run", type=Path, metavar="RUN", help=kinds)
    where, page = "where to write the page (default: %(default)s)", Path("trajectories.html")
    parser.add_argument("-o", "--output", type=Path, default=page, metavar="FILE", help=where)
    limit = "the most trajectories to show, in equal shares from each dataset or step (default: %(default)s)"
    parser.add_argument("--limit", type=at_least(1), default=LIMIT, metavar="N", help=limit)
    arguments = parser.parse_args(words)
    with mistakes():
        shown, total, notes = write_page(**vars(arguments))
    print("\n".join([f"{shown:,} of {total:,} trajectories: {arguments.output}", *notes]))


def write_page(run: Path, output: Path, limit: int = LIMIT) -> tuple[int, int, list[str]]:
    """Write the page of a run: at most `limit` trajectories, the first ones of each dataset or step in equal shares.

    Returns:
        The number of trajectories on the page, the total number, and notes for the reader, one sentence each.

    Raises:
        FileNotFoundError: `run` is not a folder of trajectories.
        ValueError: `run` holds no trajectory yet, or `output` cannot be a file.
    """
    if not output.parent.is_dir() or output.is_dir():
        raise ValueError(f"`output` is {str(output)!r}, but must be a file in an existing folder")
    source = open_run(run)
    total = sum(source.sizes.values())
    share = max(1, limit // max(1, len(source.sizes))) if total > limit else total
    entries = [entry for name in source.sizes for entry in islice(source.read(name), share)][:limit]
    if not entries:
        raise ValueError(f"{run} has no trajectory yet: try again when a batch is finished")
    notes = list(source.notes)
    if len(entries) < total:
        notes.append(f"{total - len(entries):,} of {total:,} trajectories are left out: --limit is {limit:,}.")
    page = render_page(f"Trajectories of {run.resolve().name}", source.kind, entries, notes)
    write_whole(output, page.encode("utf-8", "replace"))
    return len(entries), total, notes


def render_page(title: str, kind: str, entries: Sequence[Entry], notes: Sequence[str] = ()) -> str:
    """The whole HTML document, of the kind `EVALUATION` or `TRAINING`. The browser must not fetch anything."""
    style, *scripts = (_asset(name) for name in (STYLE, *SCRIPTS))
    # Each trajectory by itself, because `json` holds a separate text for every number that it is given.
    head = embed({"kind": kind, "notes": notes})
    trajectories = ",".join(embed(vars(entry)) for entry in entries)
    return Template(_asset("view.html")).substitute(
        title=escape(title),
        style=style,
        data=f'{head[:-1]},"trajectories":[{trajectories}]}}',
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def embed(content: Any) -> str:
    """JSON that no HTML parser can misread: without `<`, and in ASCII, so that any text fits, even lone surrogates."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", r"\u003c")


def _asset(name: str) -> str:
    return files("sorl_trl.records").joinpath(f"assets/{name}").read_text(encoding="utf-8")


EVALUATION, TRAINING = "evaluation", "training"
ANSWERED, REWARDED = ("right", "wrong"), ("rewarded", "unrewarded")
ENVIRONMENT = -1
"""The turn id of tokens that belong to no turn."""
DIGITS = 6
"""Significant digits of ratios and advantages. More would not be visible, and there are many tokens."""


@dataclass(frozen=True)
class Entry:
    """One trajectory, in JSON types. The page's scripts use these names."""

    key: str
    """Its name in the page's address."""
    part: str
    """Its dataset, or its optimizer step."""
    group: str
    """A name that it shares with the trajectories of its group. Others of the same name have another prompt."""
    group_rewards: Sequence[float | str | None]
    """The rewards of the whole group, if training recorded them."""
    question: str | None
    golden_answers: Sequence[str]
    options: Sequence[tuple[str, str]]
    """Letter and text of each option; empty for an open question."""
    answer: str | None
    verdict: str
    """"right" or "wrong"; where only a reward says it, "rewarded" or "unrewarded"; else "unscored"."""
    score: float | str | None
    """The reward; in an evaluation without rewards, `correct`."""
    stop_reason: str | None
    token_count: int
    """The number of tokens in turns. In training, it is 0 if the trajectory was masked, because no turn remains."""
    facts: Mapping[str, str]
    """Other facts to show, by name."""
    measures: Mapping[str, Any]
    prompt: str
    segments: Sequence[Mapping[str, Any]]
    """All have `token_count`, and `context`, its number. A "turn" has `action`, either `text` or `tokens`, and perhaps
    `agent` and `reward`; an "observation" `text`, `passages`, `truncated`, `neutralized`, `repeats`, and `role` if the
    rollout recorded it."""


@dataclass(frozen=True)
class Source:
    """The trajectories of a run: `kind` is `EVALUATION` or `TRAINING`."""

    kind: str
    sizes: Mapping[str, int]
    """The number of trajectories by dataset or optimizer step."""
    read: Callable[[str], Iterator[Entry]]
    """Yields the trajectories of a dataset or step. It keeps a file open until it is exhausted or released."""
    notes: Sequence[str] = ()
    """Notes for readers of the page, a sentence each."""


def open_run(run: str | os.PathLike[str]) -> Source:
    """Find the trajectories of a folder and count them, without reading any.

    Raises:
        FileNotFoundError: It is neither the folder of an evaluation nor of a training run that wrote trajectories.
    """
    check_run_folder(run)
    evaluation = evaluation_in(run)
    is_evaluated = (evaluation / SETTINGS).is_file()
    if any(Path(run).glob(SHARDS)):
        steps = {f"step {step}": (step, size) for step, size in count_trained(run).items()}
        sizes = {name: size for name, (_, size) in steps.items()}
        is_beside = is_evaluated and evaluation != Path(run)  # otherwise the settings belong to something else
        command = sorl_command("view", str(evaluation))
        notes = [f"This page shows training. To see the evaluation: {command}"] if is_beside else []
        return Source(TRAINING, sizes, lambda name: _step(run, steps[name][0]), notes)
    if is_evaluated:
        settings = read_settings(evaluation)
        is_finished = (evaluation / RESULTS).exists()
        notes = [] if is_finished else ["The evaluation is unfinished: this page shows its finished batches."]
        notes += [problem] if (problem := why_stale(evaluation)) else []
        sizes = {name: count_evaluated(evaluation, name) for name in settings["datasets"]}
        return Source(EVALUATION, sizes, lambda name: _evaluated(evaluation, name), notes)
    remedy = f"run `{sorl_command('evaluate', str(run))}`" if policy_in(run) else "give the folder of a run"
    raise FileNotFoundError(
        f"{run} has no trajectories: {remedy}; training writes its own with `save_trajectories_steps`"
    )


def _step(run: str | os.PathLike[str], step: int) -> Iterator[Entry]:
    for number, trained in enumerate(read_trained(run, step), 1):  # over all processes
        yield training_entry(trained, f"step-{step}/{number}")


def _evaluated(evaluation: Path, dataset: str) -> Iterator[Entry]:
    seen = Counter[str]()  # ids of questions may repeat
    for entry in map(evaluation_entry, read_evaluated(evaluation, dataset)):
        seen[entry.key] += 1
        yield entry if seen[entry.key] == 1 else replace(entry, key=f"{entry.key}/{seen[entry.key]}")


def evaluation_entry(row: Mapping[str, Any]) -> Entry:
    """The entry of a row of an evaluation, without token ids and log-probabilities."""
    about = {"id": row["question_id"], **{name: row[name] for name in ("sample", "data_source")}}
    about |= json.loads(row["metadata"])
    measures = {name: row[name] for name in MEASURES} | json.loads(row["environment"] or "{}")
    return Entry(
        key=f"{row['dataset']}/{row['question_id']}/{row['sample']}",
        part=row["dataset"],
        group=f"{row['dataset']}/{row['question_id']}",
        group_rewards=(),
        question=row["question"],
        golden_answers=row["golden_answers"],
        options=[(option["letter"], option["text"]) for option in row["options"]],
        answer=row["answer"],
        verdict=_verdict(row["correct"], ANSWERED, _verdict(measures.get("reward"), REWARDED)),
        score=_number(measures.get("reward", row["correct"])),
        stop_reason=row["stop_reason"],
        token_count=sum(len(segment["token_ids"]) for segment in row["segments"] if segment["kind"] == "turn"),
        facts={name: _fact(value) for name, value in about.items() if value not in ("", None)},
        measures={name: _number(value) for name, value in measures.items()},
        prompt=row["prompt"],
        segments=tuple(map(_segment, row["segments"])),
    )


def training_entry(trained: TrainedTrajectory, key: str) -> Entry:
    """The entry of a trajectory that was trained on."""
    return Entry(
        key=key,
        part=f"step {trained.step}",
        group=f"{trained.generated_at_step}/{trained.group}",
        group_rewards=tuple(map(_number, trained.group_rewards)),
        question=trained.question,
        golden_answers=trained.golden_answers,
        options=(),
        answer=trained.answer,
        verdict=_verdict(trained.reward, REWARDED),
        score=_number(trained.reward),
        stop_reason=trained.stop_reason,
        token_count=sum(turn != ENVIRONMENT for turn in trained.turn_ids),
        facts={"step": _fact(trained.step), "generated_at_step": _fact(trained.generated_at_step)},
        measures={"reward": _number(trained.reward)},
        prompt=trained.prompt,
        segments=tuple(_trained_segments(trained)),
    )


def _segment(row: Mapping[str, Any]) -> dict[str, Any]:
    common = {name: row[name] for name in ("kind", "text", "context")} | {"token_count": len(row["token_ids"])}
    if row["kind"] == "turn":
        return {**common, "action": row["tool"] or row["action"], **_given(row["role"], row["reward"])}
    passages = [{**passage, "score": _number(passage["score"])} for passage in row["passages"]]
    marks = {name: row[name] for name in ("truncated", "neutralized", "role", "repeats")}
    return {**common, "passages": passages, **marks}


def _trained_segments(trained: TrainedTrajectory) -> Iterator[dict[str, Any]]:
    """Cut the completion where turn or context changes. A turn's action is known only if the rollout recorded it."""
    count = len(set(trained.turn_ids) - {ENVIRONMENT})
    is_recorded, is_named = len(trained.actions) == count, len(trained.agents) == count
    contexts = trained.context_ids or (0,) * len(trained.turn_ids)
    start, last_turn = 0, ENVIRONMENT
    for (turn_id, context), tokens in groupby(zip(trained.turn_ids, contexts, strict=True)):
        span = slice(start, start + len(list(tokens)))
        segment: dict[str, Any] = {"token_count": span.stop - start, "context": abs(context)}
        if turn_id == ENVIRONMENT:
            segment |= {"kind": "observation", "text": "".join(trained.tokens[span]), "role": None}
            segment |= {"passages": [], "truncated": False, "neutralized": 0, "repeats": context < 0}
            if context >= 0 and is_recorded and last_turn != ENVIRONMENT:
                segment["role"] = trained.roles[last_turn] or None
        else:
            agent = trained.agents[turn_id] if is_named else ""
            reward = trained.turn_rewards[turn_id] if is_recorded else None
            action = trained.actions[turn_id] if is_recorded else None
            segment |= {"kind": "turn", "action": action, "tokens": _tokens(trained, span), **_given(agent, reward)}
        yield segment
        start, last_turn = span.stop, last_turn if context < 0 else turn_id


def _given(agent: str | None, reward: float | None) -> dict[str, Any]:
    """The agent of a turn, if the rollout named one, and its reward, if its environment gave one."""
    named = {"agent": agent} if agent else {}
    return named if reward is None else {**named, "reward": _number(reward)}


def _tokens(trained: TrainedTrajectory, span: slice) -> dict[str, Any]:
    """Columns with one value per token. A clip state is its first letter."""
    numbers = {name: getattr(trained, name)[span] for name in ("token_ratios", "ratios", "advantages")}
    columns = {name: [_number(value) for value in values] for name, values in numbers.items()}
    return {"text": trained.tokens[span], **columns, "clipped": "".join(state[0] for state in trained.clipped[span])}


def _verdict(score: float | None, names: tuple[str, str], missing: str = "unscored") -> str:
    return missing if score is None else names[not score > 0]  # so NaN is not right


def _fact(value: Any) -> str:
    """A value as text. Strings are unchanged, because a number in one may be a year."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _number(value: float | None) -> float | str | None:
    """Round a number. If it is not finite, return a word that JavaScript's `Number` accepts; JSON has none."""
    if value is None or math.isfinite(value):
        return value if value is None else float(f"{value:.{DIGITS}g}")
    return json.dumps(value)
