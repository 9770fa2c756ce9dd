"""Trajectories to the lists that training reads, and the check that nothing was lost on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sorl_trl.types import Trajectory, Turn


@dataclass(frozen=True)
class AssembledTrajectory:
    """A completion, token by token; all lists have its length."""

    completion_ids: list[int]
    """Turns and observations in order; empty for a trajectory without a turn, and never else."""
    env_mask: list[int]
    """1 on what the policy sampled and is trained on."""
    turn_ids: list[int]
    """The turn's index, counted from 0, where `env_mask` is 1; −1 elsewhere."""
    logprobs: list[float] | None
    """The sampling engine's log-probabilities, 0.0 on observations; None where a turn has none."""


def assemble(trajectories: Sequence[Trajectory]) -> list[AssembledTrajectory]:
    """Lay out each trajectory token by token.

    One that an infrastructure failure ended keeps its tokens, with `env_mask` 0 and `turn_ids` −1 on all of them.
    """
    return [_assemble_one(trajectory) for trajectory in trajectories]


def _assemble_one(trajectory: Trajectory) -> AssembledTrajectory:
    trained = not trajectory.stop_reason.is_infrastructure_failure
    completion_ids: list[int] = []
    turn_ids: list[int] = []
    logprobs: list[float] = []
    turn = 0
    for segment in trajectory.segments:
        size = len(segment.token_ids)
        is_turn = isinstance(segment, Turn)
        completion_ids += segment.token_ids
        turn_ids += [turn if is_turn and trained else -1] * size
        logprobs += (segment.logprobs or ()) if isinstance(segment, Turn) else [0.0] * size
        turn += is_turn
    has_logprobs = all(turn.logprobs is not None for turn in trajectory.turns)
    env_mask = [int(turn_id >= 0) for turn_id in turn_ids]
    return AssembledTrajectory(completion_ids, env_mask, turn_ids, logprobs if has_logprobs else None)


def check_assembly(trajectories: Sequence[Trajectory], assembled: Sequence[AssembledTrajectory]) -> None:
    """Raise ValueError, naming the row, unless each row shows its trajectory exactly.

    The turns partition the trainable tokens; each turn's ids are those that were sampled, in place; turn ids count
    from 0 without gaps; lists are equally long.
    """
    if len(trajectories) != len(assembled):
        raise ValueError(
            f"{len(assembled)} assembled rows for {len(trajectories)} trajectories: there must be one each"
        )
    for i, (trajectory, row) in enumerate(zip(trajectories, assembled, strict=True)):
        if problem := _shape_problem(row, bool(trajectory.segments)) or _content_problem(trajectory, row):
            raise ValueError(f"row {i} (stop reason {trajectory.stop_reason.value}): {problem}")


def _shape_problem(row: AssembledTrajectory, has_segments: bool) -> str | None:
    """What is wrong with the lists by themselves."""
    size = len(row.completion_ids)
    if not size and has_segments:
        return "completion_ids is empty"
    for name in ("env_mask", "turn_ids", "logprobs"):
        values = getattr(row, name)
        if values is not None and len(values) != size:
            return f"{name} has {len(values)} entries for {size} completion_ids"
    for position, (mask, turn_id) in enumerate(zip(row.env_mask, row.turn_ids, strict=True)):
        if mask not in (0, 1) or turn_id < -1 or mask != (turn_id >= 0):
            return f"position {position} has env_mask {mask}, turn_ids {turn_id}: allowed are 1 with ≥ 0, 0 with -1"
    return None


def _content_problem(trajectory: Trajectory, row: AssembledTrajectory) -> str | None:
    """Where the lists differ from the trajectory."""
    trained = not trajectory.stop_reason.is_infrastructure_failure
    start, turns = 0, 0
    for segment in trajectory.segments:
        is_turn, end = isinstance(segment, Turn), start + len(segment.token_ids)
        if is_turn and start == end:
            return f"turn {turns} has no token"
        if tuple(row.completion_ids[start:end]) != segment.token_ids:
            return f"completion_ids[{start}:{end}] must be the {type(segment).__name__.lower()} {segment.token_ids}"
        expected = turns if is_turn and trained else -1
        if any(turn_id != expected for turn_id in row.turn_ids[start:end]):
            return f"turn_ids[{start}:{end}] must be {expected}, got {row.turn_ids[start:end]}"
        start, turns = end, turns + is_turn
    surplus = len(row.completion_ids) - start
    return f"completion_ids has {surplus} tokens beyond the trajectory's" if surplus else None
