"""The data of the trajectory page: one entry per trajectory, of an evaluation or of training."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from sorl_trl.files import check_run_folder
from sorl_trl.records import policy_in
from sorl_trl.records.evaluated import (
    MEASURES,
    RESULTS,
    SETTINGS,
    count_evaluated,
    evaluation_in,
    outdated,
    read_evaluated,
    read_settings,
)
from sorl_trl.records.trained import SHARDS, TrainedTrajectory, count_trained, read_trained

EVALUATION, TRAINING = "evaluation", "training"
ENVIRONMENT = -1
"""The turn id of tokens that belong to no turn."""
DIGITS = 6
"""Significant digits of ratios and advantages. Nobody would see more, and there are many tokens."""


@dataclass(frozen=True)
class Entry:
    """One trajectory, in JSON's types. The page's scripts read it by these names."""

    key: str
    """Its name in the address of the page."""
    group: str
    """Its dataset, or its optimizer step."""
    question: str | None
    golden_answers: Sequence[str]
    options: Sequence[tuple[str, str]]
    """Letter and text of each option; empty for an open question."""
    answer: str | None
    verdict: str
    """"right", "wrong" or "unscored"."""
    score: float | str | None
    """`correct` in an evaluation, the reward in training."""
    stop_reason: str | None
    token_count: int
    """The number of tokens in turns. In training, it is 0 if the trajectory was masked, because no turn is left."""
    facts: Mapping[str, str]
    """Other facts to show, by name."""
    measures: Mapping[str, Any]
    prompt: str
    segments: Sequence[Mapping[str, Any]]
    """A "turn" has `action`, `token_count`, either `text` or `tokens`, and perhaps `reward`; an "observation" `text`,
    `token_count`, `passages`, `truncated`, `neutralized`, and `role` if the rollout recorded it. The first segment of
    another context than before has its number as `context`; `repeated` observations were read before."""


@dataclass(frozen=True)
class Source:
    """The trajectories of a run: `kind` is `EVALUATION` or `TRAINING`."""

    kind: str
    sizes: Mapping[str, int]
    """The number of trajectories by dataset or optimizer step."""
    read: Callable[[str], Iterator[Entry]]
    """Yields the trajectories of a dataset or step. It holds a file open until it is exhausted or released."""
    notes: Sequence[str] = ()
    """Notes for readers of the page, a sentence each."""


def open_run(run: str | os.PathLike[str]) -> Source:
    """Find the trajectories of a folder and count them, without reading any.

    Raises:
        FileNotFoundError: It is neither the folder of an evaluation nor of a training run that wrote trajectories.
    """
    check_run_folder(run)
    evaluation = evaluation_in(run)
    evaluated = (evaluation / SETTINGS).is_file()
    if any(Path(run).glob(SHARDS)):
        steps = {_step_name(step): (step, size) for step, size in count_trained(run).items()}
        sizes = {name: size for name, (_, size) in steps.items()}
        beside = evaluated and evaluation != Path(run)  # otherwise the settings belong to something else
        notes = [f"Of training; the evaluation beside it: sorl view {evaluation}"] if beside else []
        return Source(TRAINING, sizes, lambda name: _step(run, steps[name][0]), notes)
    if evaluated:
        settings = read_settings(evaluation)
        finished = (evaluation / RESULTS).exists()
        notes = [] if finished else ["The evaluation is not finished: its finished batches are here."]
        notes += [problem] if (problem := outdated(evaluation)) else []
        sizes = {name: count_evaluated(evaluation, name) for name in settings["datasets"]}
        return Source(EVALUATION, sizes, lambda name: _evaluated(evaluation, name), notes)
    made = f"`sorl evaluate {run}` makes some" if policy_in(run) else "name the folder of a run"
    raise FileNotFoundError(
        f"{run} holds no trajectories: {made}; training writes its own with `save_trajectories_steps`"
    )


def _step(run: str | os.PathLike[str], step: int) -> Iterator[Entry]:
    for number, each in enumerate(read_trained(run, step), 1):  # over all processes
        yield training_entry(each, f"step-{step}/{number}")


def _evaluated(evaluation: Path, dataset: str) -> Iterator[Entry]:
    seen = Counter[str]()  # ids of questions may repeat
    for entry in map(evaluation_entry, read_evaluated(evaluation, dataset)):
        seen[entry.key] += 1
        yield entry if seen[entry.key] == 1 else replace(entry, key=f"{entry.key}/{seen[entry.key]}")


def _step_name(step: int) -> str:
    return f"step {step}"


def evaluation_entry(row: Mapping[str, Any]) -> Entry:
    """The entry of a row of an evaluation, without token ids and log-probabilities."""
    about = {"id": row["question_id"], **{name: row[name] for name in ("sample", "data_source")}}
    about |= json.loads(row["metadata"])
    measures = {name: row[name] for name in MEASURES} | json.loads(row.get("environment") or "{}")
    return Entry(
        key=f"{row['dataset']}/{row['question_id']}/{row['sample']}",
        group=row["dataset"],
        question=row["question"],
        golden_answers=row["golden_answers"],
        options=[(option["letter"], option["text"]) for option in row["options"]],
        answer=row["answer"],
        verdict=_verdict(row["correct"]),
        score=_number(row["correct"]),
        stop_reason=row["stop_reason"],
        token_count=sum(len(segment["token_ids"]) for segment in row["segments"] if segment["kind"] == "turn"),
        facts={name: _fact(value) for name, value in about.items() if value not in ("", None)},
        measures={name: _number(value) for name, value in measures.items()},
        prompt=row["prompt"],
        segments=tuple(map(_segment, row["segments"])),
    )


def training_entry(each: TrainedTrajectory, key: str) -> Entry:
    """The entry of a trajectory that was trained on."""
    return Entry(
        key=key,
        group=_step_name(each.step),
        question=each.question,
        golden_answers=each.golden_answers,
        options=(),
        answer=each.answer,
        verdict=_verdict(each.reward),
        score=_number(each.reward),
        stop_reason=each.stop_reason,
        token_count=sum(turn != ENVIRONMENT for turn in each.turn_ids),
        facts={"step": _fact(each.step), "generated_at_step": _fact(each.generated_at_step)},
        measures={"reward": _number(each.reward)},
        prompt=each.prompt,
        segments=tuple(_trained_segments(each)),
    )


def _segment(row: Mapping[str, Any]) -> dict[str, Any]:
    common = {"kind": row["kind"], "text": row["text"], "token_count": len(row["token_ids"])}
    if row["kind"] == "turn":
        return {**common, "action": row["tool"] or row["action"], **_reward(row["reward"])}
    passages = [{**passage, "score": _number(passage["score"])} for passage in row["passages"]]
    marks = {"truncated": row["truncated"], "neutralized": row["neutralized"], "role": row.get("role")}
    return {**common, "passages": passages, **marks}


def _trained_segments(each: TrainedTrajectory) -> Iterator[dict[str, Any]]:
    """A dump identifies turns only by their ids. What they did is known only if the rollout recorded it."""
    start, last, before = 0, ENVIRONMENT, 0
    is_told = len(each.actions) == len(set(each.turn_ids) - {ENVIRONMENT})
    contexts = each.context_ids or (0,) * len(each.turn_ids)
    for (turn_id, context), of_segment in groupby(zip(each.turn_ids, contexts, strict=True)):
        stop = start + len(list(of_segment))
        begins, before = {} if abs(context) == before else {"context": abs(context)}, abs(context)
        span, start = slice(start, stop), stop
        text = "".join(each.tokens[span])
        if turn_id == ENVIRONMENT:
            role = each.roles[last] if is_told and 0 <= last < len(each.roles) else None
            marks: dict[str, Any] = {"passages": [], "truncated": False, "neutralized": 0, "role": role, **begins}
            if context < 0:
                marks |= {"role": None, "repeated": True}
            yield {"kind": "observation", "text": text, "token_count": len(each.tokens[span]), **marks}
        else:
            turn: dict[str, Any] = {"action": None}
            if is_told:
                turn = {"action": each.actions[turn_id], **_reward(each.turn_rewards[turn_id])}
            size = {"token_count": len(each.tokens[span]), **begins}
            yield {"kind": "turn", **turn, **size, "tokens": _tokens(each, span)}
        last = last if context < 0 else turn_id


def _reward(reward: float | None) -> dict[str, Any]:
    """The reward of a turn, if its environment gave one."""
    return {} if reward is None else {"reward": _number(reward)}


def _tokens(each: TrainedTrajectory, span: slice) -> dict[str, Any]:
    """Columns with one value per token. A clip state is its first letter."""
    numbers = {name: getattr(each, name)[span] for name in ("token_ratios", "ratios", "advantages")}
    columns = {name: [_number(value) for value in values] for name, values in numbers.items()}
    return {"text": each.tokens[span], **columns, "clipped": "".join(state[0] for state in each.clipped[span])}


def _verdict(score: float | None) -> str:
    if score is None:
        return "unscored"
    return "right" if score > 0 else "wrong"


def _fact(value: Any) -> str:
    """A value as text. A string stays as it is, because a number in it may be a year."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _number(value: float | None) -> float | str | None:
    """Round a number. If it is not finite, return the word that JavaScript's `Number` reads, because JSON has none."""
    if value is None or math.isfinite(value):
        return value if value is None else float(f"{value:.{DIGITS}g}")
    return json.dumps(value)
