"""Trajectories as an update of the policy saw them, token by token: rows of Parquet files, and back.

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
"""Of a ratio: in the clip range; out of it with its gradient; out of it without; of no turn that is trained on."""
_ROWS_AT_ONCE = 32
"""Of a file, which holds thousands perhaps: a token takes hundreds of bytes in memory."""


@dataclass(frozen=True)
class TrainedTrajectory:
    """A trajectory in one update. The fields from `tokens` on have an entry per token of the completion."""

    step: int
    """The optimizer step, from 1."""
    generated_at_step: int
    """How many optimizer steps had been made when it was collected."""
    prompt: str
    question: str | None
    """The `question` of the training set, where it has that column."""
    golden_answers: tuple[str, ...]
    """Likewise."""
    reward: float | None
    """Of all reward functions, weighted; None if no function gave one."""
    answer: str | None
    """The policy's, where a `SearchRollout` collected the trajectory."""
    stop_reason: str | None
    """Likewise."""
    tokens: tuple[str, ...]
    """Their texts, joined the completion. A character that several tokens make up stands at the last of them."""
    turn_ids: tuple[int, ...]
    """-1: not trained on."""
    token_ratios: tuple[float, ...]
    """Policy over old policy, as the update found it."""
    ratios: tuple[float, ...]
    """The same of what shares a ratio: the token, its turn, or the sequence."""
    advantages: tuple[float, ...]
    clipped: tuple[str, ...]
    """INSIDE, OUTSIDE, CLIPPED or UNTRAINED."""
    actions: tuple[str, ...] = ()
    """What each turn of the rollout did: the tool that it called, or "search", "answer", "invalid". Empty where no
    `SearchRollout` or other `AgentRollout` collected the trajectory."""
    turn_rewards: tuple[float | None, ...] = ()
    """Likewise: what the environment gave for each turn."""
    roles: tuple[str, ...] = ()
    """Likewise: who spoke in each observation, a "tool" or the "user"."""


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
    """Keep what the process `rank` trained on in an optimizer step, in place of what was kept before; the file."""
    path = Path(run) / FOLDER / f"step_{step:08d}_rank_{rank:04d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([storable(vars(trained)) for trained in rows], SCHEMA)
    write_whole(path, lambda file: pq.write_table(table, file, compression="zstd"))
    return path


def discard_later(run: str | os.PathLike[str], step: int) -> None:
    """Delete what was kept of the steps after `step`, from which a run starts anew."""
    for kept, file in _shards(run):
        if kept > step:
            file.unlink(missing_ok=True)  # each node does this, perhaps in one folder


def count_trained(run: str | os.PathLike[str]) -> dict[int, int]:
    """How many trajectories `read_trained` gives of each step, in its order. None of them is read for it."""
    counts: Counter[int] = Counter()
    for step, file in _shards(run):
        counts[step] += pq.read_metadata(file).num_rows
    return dict(counts)


def read_trained(run: str | os.PathLike[str], step: int | None = None) -> Iterator[TrainedTrajectory]:
    """What `write_trained` has kept of a run, or of a step of it: step by step and, within one, process by process."""
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
