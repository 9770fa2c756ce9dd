"""Trajectories as training updates used them, token by token: writes and reads rows of Parquet files.

trajectories/step_00000010_rank_0000.parquet  what one process trained on in the 10th optimizer step
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sorl_trl.files import write_whole
from sorl_trl.text import storable

FOLDER = "trajectories"
SHARDS = f"{FOLDER}/step_*_rank_*.parquet"
INSIDE, OUTSIDE, CLIPPED, UNTRAINED = "inside", "outside", "clipped", "none"
"""Where a ratio is: in the clip range; outside, with a gradient; outside, without one; on an untrained token."""
_ROWS_AT_ONCE = 32
"""Rows to read at a time; few, because a file may have thousands, and a token takes hundreds of bytes in memory."""


@dataclass(frozen=True)
class TrainedTrajectory:
    """A trajectory in one update. The fields from `tokens` to `clipped` have one entry per token of the completion."""

    step: int
    """The optimizer step, from 1."""
    generated_at_step: int
    """How many optimizer steps had been made when it was sampled."""
    prompt: str
    question: str | None
    """The `question` in the training set, if it has that column."""
    golden_answers: tuple[str, ...]
    """The `golden_answers` in the training set, if it has that column."""
    reward: float | None
    """The weighted sum of all reward functions; None if none gave one."""
    answer: str | None
    """The policy's answer, if an `AgentRollout` collected the trajectory."""
    stop_reason: str | None
    """Why the trajectory ended, if an `AgentRollout` collected it."""
    tokens: tuple[str, ...]
    """The tokens' texts, which join to the completion. A character belongs to its last token."""
    turn_ids: tuple[int, ...]
    """The turn of each token, -1 where it is not trained on."""
    token_ratios: tuple[float, ...]
    """The ratio of the policy to the old policy before the update."""
    ratios: tuple[float, ...]
    """The ratio of the token's unit: the token, its turn, or the sequence."""
    advantages: tuple[float, ...]
    clipped: tuple[str, ...]
    """INSIDE, OUTSIDE, CLIPPED or UNTRAINED."""
    actions: tuple[str, ...] = ()
    """The action of each turn: the tool that it called, or "search", "answer" or "invalid". Empty unless an
    `AgentRollout`, such as `SearchRollout`, collected the trajectory."""
    turn_rewards: tuple[float | None, ...] = ()
    """The environment's reward for each turn; likewise."""
    roles: tuple[str, ...] = ()
    """The speaker in the observation after each turn, "tool" or "user", or "" if there is none; likewise."""
    agents: tuple[str, ...] = ()
    """The agent of each turn, or "" if the rollout names none."""
    context_ids: tuple[int, ...] = ()
    """The context of each token, negative where a context repeats another; empty if the rollout has one context."""
    group: int = 0
    """The number of its group in the rollout."""
    group_rewards: tuple[float | None, ...] = ()
    """The rewards of the whole group, of which an update may get a part."""


_ARROW = {
    "int": pa.int64(),
    "str": pa.string(),
    "str | None": pa.string(),
    "float | None": pa.float64(),
    "tuple[str, ...]": pa.list_(pa.string()),
    "tuple[int, ...]": pa.list_(pa.int32()),
    "tuple[float, ...]": pa.list_(pa.float32()),
    "tuple[float | None, ...]": pa.list_(pa.float64()),
}
SCHEMA = pa.schema([(field.name, _ARROW[str(field.type)]) for field in fields(TrainedTrajectory)])
_LISTS = {name for name in SCHEMA.names if isinstance(SCHEMA.field(name).type, pa.ListType)}


def write_trained(run: str | os.PathLike[str], step: int, rank: int, rows: Sequence[TrainedTrajectory]) -> Path:
    """Write what the process `rank` trained on in a step, replacing an earlier file, and return the file."""
    path = Path(run) / FOLDER / f"step_{step:08d}_rank_{rank:04d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([storable(vars(trained)) for trained in rows], SCHEMA)
    write_whole(path, lambda file: pq.write_table(table, file, compression="zstd"))
    return path


def discard_later(run: str | os.PathLike[str], step: int) -> None:
    """Delete the records of steps after `step`, because a run restarts there."""
    for kept, file in _shards(run):
        if kept > step:
            file.unlink(missing_ok=True)  # several nodes may do this in the same folder


def count_trained(run: str | os.PathLike[str]) -> dict[int, int]:
    """The number of trajectories that `read_trained` would yield per step, in order, without reading them."""
    counts: Counter[int] = Counter()
    for step, file in _shards(run):
        counts[step] += pq.read_metadata(file).num_rows
    return dict(counts)


def read_trained(run: str | os.PathLike[str], step: int | None = None) -> Iterator[TrainedTrajectory]:
    """Read the records of a run, or of one of its steps, ordered by step and then by process."""
    for kept, file in _shards(run):
        if step in (None, kept):
            for batch in pq.ParquetFile(file).iter_batches(batch_size=_ROWS_AT_ONCE):
                yield from map(_trained, batch.to_pylist())


def _shards(run: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    """The files with their steps, in order."""
    return sorted((int(file.stem.split("_")[1]), file) for file in Path(run).glob(SHARDS))


def _trained(row: dict[str, Any]) -> TrainedTrajectory:
    columns: dict[str, Any] = {name: tuple(value) if name in _LISTS else value for name, value in row.items()}
    return TrainedTrajectory(**columns)
