"""From the timeline that a rollout records to the file that reports read."""

from __future__ import annotations

from sorl_trl.diagnostics.rollout_times import RolloutTimes
from sorl_trl.rollout import Timeline


def rollout_times(timeline: Timeline) -> RolloutTimes:
    """Where the time of a rollout went. A trajectory that an exception cut off ends where the rollout did."""
    return RolloutTimes(
        rows=timeline.rows,
        seconds=timeline.seconds,
        seconds_generating=timeline.seconds_generating,
        seconds_searching=timeline.seconds_searching,
        sampled_tokens=timeline.sampled_tokens,
        spans=[(span.row, span.phase.value, span.start_s, span.end_s) for span in timeline.spans],
        waits=timeline.waits,
        ended_s=[timeline.ended_s.get(row, timeline.seconds) for row in range(timeline.rows)],
    )
