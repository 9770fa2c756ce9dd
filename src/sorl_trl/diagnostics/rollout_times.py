"""Where the time of one rollout went, as a file that training writes and reports read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sorl_trl.files import write_whole

ROLLOUT_FILE = "rollout_times.json"
"""In the `output_dir` of a run: its last rollout."""
PHASES = ("prefill", "decode", "search")
"""What a row is doing. Between its phases it is idle, until its trajectory has ended."""
_DIGITS = 5

RowSpan = tuple[int, str, float, float]
"""Row, phase, and the seconds since the rollout began at which it began and ended."""


@dataclass(frozen=True)
class RolloutTimes:
    """The phases of each row of a rollout, and what the rollout as a whole spent its time on.

    Args:
        rows: How many trajectories there were.
        seconds: How long the rollout took.
        seconds_generating: In which the engine was busy.
        seconds_searching: In which at least one row waited for a reply.
        sampled_tokens: Of all rows.
        spans: The phases. Decoding goes on through `waits`, but no row decodes in them.
        waits: When the rollout stood still for a reply, from when to when, in order.
        ended_s: When each trajectory ended, by row.

    Raises:
        ValueError: A span or an end is of a row that there is not, or a phase has an unknown name.
    """

    rows: int
    seconds: float
    seconds_generating: float
    seconds_searching: float
    sampled_tokens: int
    spans: Sequence[RowSpan]
    waits: Sequence[tuple[float, float]]
    ended_s: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.ended_s) != self.rows:
            raise ValueError(f"ended_s has {len(self.ended_s)} entries for {self.rows} rows: there must be one each")
        for row, phase, _, _ in self.spans:
            if not 0 <= row < self.rows or phase not in PHASES:
                raise ValueError(
                    f"a span is of row {row} in phase {phase!r}: rows are 0 to {self.rows - 1}, phases {PHASES}"
                )

    @property
    def seconds_waiting(self) -> float:
        """In which the rollout stood still for a reply."""
        return sum(end - start for start, end in self.waits)

    def shares(self) -> dict[str, float]:
        """The share of each phase, and of `idle`, in the time of all rows until their trajectories ended."""
        total = sum(self.ended_s)
        busy = {phase: sum(end - start for _, name, start, end in self.spans if name == phase) for phase in PHASES}
        decoding = [(start, end) for _, name, start, end in self.spans if name == "decode"]
        busy["decode"] -= sum(self._waited(end) - self._waited(start) for start, end in decoding)
        shares = {phase: seconds / total if total else 0.0 for phase, seconds in busy.items()}
        return shares | {"idle": max(0.0, 1 - sum(shares.values())) if total else 0.0}

    def _waited(self, until: float) -> float:
        return sum(max(0.0, min(end, until) - start) for start, end in self.waits)

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        content = {name: _rounded(value) for name, value in vars(self).items()}
        write_whole(path, json.dumps(content, separators=(",", ":")).encode())


def load_rollout_times(path: Path) -> RolloutTimes:
    """Read what `RolloutTimes.write` has written. Raises ValueError for another file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        spans = [(int(row), str(phase), float(start), float(end)) for row, phase, start, end in content.pop("spans")]
        waits = [(float(start), float(end)) for start, end in content.pop("waits")]
        return RolloutTimes(spans=spans, waits=waits, **content)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{path} is not what training writes there ({error}): remove it, or train anew") from error


def _rounded(value: object) -> object:
    """With as many digits as a picture needs."""
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value
