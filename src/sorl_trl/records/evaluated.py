"""Trajectories as an evaluation recorded them, with text and scores, as rows of Parquet files.

settings.json                          everything that determines the outcome of the run
trajectories/<dataset>/000000.parquet  one batch; `datasets.load_dataset("parquet", …)` reads them
results.json, results.md               written once all batches are complete

Files get their names only once they are complete, so a killed run leaves only complete batches.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sorl_trl.files import write_whole
from sorl_trl.qa import Question
from sorl_trl.records import evaluation_of
from sorl_trl.text import storable
from sorl_trl.types import Observation, StopReason, Trajectory, Turn

SETTINGS, FOLDER, RESULTS, TABLE = "settings.json", "trajectories", "results.json", "results.md"
POLICY_HASH = "policy_files"
"""The model setting that holds the `files_hash` of its folder."""
POLICY_PATTERNS = ("*.safetensors", "*.bin", "*config.json", "tokenizer.json", "*.jinja")
"""The files that make up a policy, without notes or pages in its folder."""
PIECE = 2**16
"""How many bytes to read at once."""
SCORES = ("correct", "exact_match", "f1", "sub_exact_match", "choice_accuracy")
"""In [0, 1]. `correct` is choice accuracy if the question has options, else exact match; for a task, whether its
environment or agent reported it solved."""
COUNTS = ("searches", "turns", "invalid_actions", "neutralized", "generated_tokens", "observation_tokens")
"""Counts per trajectory. Only answered searches count; `neutralized` counts injection attempts of observations."""
MEASURES = SCORES + COUNTS
Outcome = Mapping[str, Any]
"""From the row of a trajectory: its `question_id`, `question`, `stop_reason` and measures, and the measures of its
`environment` or agent, by name."""

_TOKEN_IDS = pa.list_(pa.int32())
_PASSAGE = pa.struct({"id": pa.string(), "title": pa.string(), "text": pa.string(), "score": pa.float64()})
_SEGMENT = pa.struct(
    {
        "kind": pa.string(),
        "text": pa.string(),
        "token_ids": _TOKEN_IDS,
        "action": pa.string(),
        "content": pa.string(),
        "tool": pa.string(),
        "reward": pa.float64(),
        "logprobs": pa.list_(pa.float64()),
        "passages": pa.list_(_PASSAGE),
        "truncated": pa.bool_(),
        "neutralized": pa.int32(),
        "role": pa.string(),
        "context": pa.int32(),
        "repeats": pa.bool_(),
    }
)
SCHEMA = pa.schema(
    {
        "dataset": pa.string(),
        "question_id": pa.string(),
        "sample": pa.int32(),
        "question": pa.string(),
        "golden_answers": pa.list_(pa.string()),
        "options": pa.list_(pa.struct({"letter": pa.string(), "text": pa.string()})),
        "data_source": pa.string(),
        "metadata": pa.string(),
        "prompt": pa.string(),
        "prompt_ids": _TOKEN_IDS,
        "segments": pa.list_(_SEGMENT),
        "answer": pa.string(),
        "stop_reason": pa.string(),
        **dict.fromkeys(MEASURES, pa.float64()),
        "environment": pa.string(),
    }
)
"""One row per trajectory. A segment's `kind` is "turn", with `action`, `content`, `tool` and optionally `reward` and
`logprobs`, or "observation", with `passages`, `truncated`, `neutralized` and `repeats`; the fields of the other kind
are null. Its `role` is the turn's agent or the observation's speaker. `metadata` is JSON, and so is `environment`,
which is null if neither an environment nor an agent measures anything. A measure is null where it does not apply (see
`sorl_trl.evaluation.run.measure`)."""


def row_of(question: Question, trajectory: Trajectory) -> dict[str, Any]:
    """The columns of a row that its question and its trajectory determine."""
    return {
        "question_id": question.id,
        "question": question.question,
        "golden_answers": question.golden_answers,
        "options": [{"letter": letter, "text": text} for letter, text in question.options.items()],
        "data_source": question.data_source,
        "metadata": json.dumps(dict(question.metadata), default=str),
        "prompt_ids": trajectory.prompt_ids,
        "segments": [_segment_row(segment) for segment in trajectory.segments],
        "answer": trajectory.answer,
        "stop_reason": trajectory.stop_reason.value,
    }


def write_evaluated(shard: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows of a batch, by column of `SCHEMA`, into the file `shard`, replacing its content."""
    table = pa.Table.from_pylist([storable(row) for row in rows], SCHEMA)
    shard.parent.mkdir(parents=True, exist_ok=True)
    write_whole(shard, lambda file: pq.write_table(table, file, compression="zstd"))


def evaluation_in(run: str | os.PathLike[str]) -> Path:
    """The evaluation in a policy's folder if it has one, else `run` itself."""
    inside = evaluation_of(run)
    return inside if (inside / SETTINGS).is_file() else Path(run)


def evaluated_shards(run: str | os.PathLike[str], dataset: str) -> list[Path]:
    """The files of the finished batches of a dataset, in the order of the run's plan."""
    return sorted((Path(run) / FOLDER / dataset).glob("[0-9]*.parquet"), key=lambda path: int(path.stem))


def read_evaluated(run: str | os.PathLike[str], dataset: str) -> Iterator[dict[str, Any]]:
    """Read the rows of all finished batches of a dataset, in the order of the run's plan: see `SCHEMA`."""
    for shard in evaluated_shards(run, dataset):
        # Read a single file: the name of its folder could make a partitioned dataset of it.
        yield from pq.ParquetFile(shard).read().to_pylist()


def read_outcomes(shards: Iterable[Path]) -> list[Outcome]:
    """Read the outcomes of batches, in order, without the text.

    If any outcome reports whether its task is `solved`, one with only a `reward` counts as unsolved: its agent raised
    an error.
    """
    columns = ["question_id", "question", "stop_reason", *MEASURES, "environment"]
    rows = (row for shard in shards for row in pq.ParquetFile(shard).read(columns=columns).to_pylist())
    outcomes = [{**row, "environment": json.loads(row["environment"] or "{}")} for row in rows]
    if any("solved" in outcome["environment"] for outcome in outcomes):
        for outcome in outcomes:
            if outcome["correct"] is None and outcome["environment"].keys() == {"reward"}:
                outcome["environment"]["solved"] = outcome["correct"] = 0.0
    return [*outcomes]


def is_masked(outcome: Outcome) -> bool:
    """Whether the trajectory carries no information about the policy, as after an infrastructure failure."""
    return StopReason(outcome["stop_reason"]).is_infrastructure_failure


def count_evaluated(run: str | os.PathLike[str], dataset: str) -> int:
    """The number of trajectories that `read_evaluated` would yield, without reading them."""
    return sum(pq.read_metadata(shard).num_rows for shard in evaluated_shards(run, dataset))


def read_settings(run: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the settings of a run. Raises FileNotFoundError if there are none, and ValueError if they are not a
    run's."""
    settings = json.loads((Path(run) / SETTINGS).read_bytes())
    if not isinstance(settings, dict) or "datasets" not in settings:
        raise ValueError(f"{run} has a {SETTINGS} that does not belong to an evaluation: choose another folder")
    return settings


def files_hash(policy: str | os.PathLike[str]) -> str | None:
    """A hash that changes when the policy in a folder does, without reading gigabytes; None without such a folder.

    It covers the name, the size and a hundred pieces of each file, so that a copy has the hash of the original.
    """
    files = sorted({path for pattern in POLICY_PATTERNS for path in Path(policy).glob(pattern) if path.is_file()})
    found = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        found.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for start in range(0, size, max(size // 100, PIECE)):
                file.seek(start)
                found.update(file.read(PIECE))
    return found.hexdigest()[:16] if files else None


def why_stale(evaluation: str | os.PathLike[str]) -> str | None:
    """The message that the policy has changed since its evaluation, with the remedy; None if it has not."""
    model = read_settings(evaluation).get("model", {})
    name, before = model.get("model_name_or_path"), model.get(POLICY_HASH)
    if before is None or files_hash(name) in (None, before):
        return None
    run = Path(evaluation).absolute().parent  # perhaps it was moved, and another run has its name now
    if before in (files_hash(run), files_hash(run / Path(name).name)):
        return None
    return (
        f"{evaluation} is stale: the policy in {name} has changed since. Remove it, or choose another `--output`, and "
        f"run `sorl evaluate {name}` again"
    )


def _segment_row(segment: Turn | Observation) -> dict[str, Any]:
    if isinstance(segment, Turn):
        action = {"action": segment.action.kind.value, "content": segment.action.content, "tool": segment.action.tool}
        return {"kind": "turn", **vars(segment), "role": segment.agent, **action}
    return {"kind": "observation", **vars(segment), "passages": list(map(vars, segment.passages))}
