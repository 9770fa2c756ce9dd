from __future__ import annotations

import pytest

from sorl_trl.types import Action, ActionKind, Observation, Passage, StopReason, Trajectory, Turn


def _turn(kind, content):
    return Turn(token_ids=(1,), text="", action=Action(kind, content))


class Episode:
    """Puts a trajectory together, step by step."""

    def __init__(self):
        self._segments = []

    def search(self, text=""):
        """A search that finds `text`. With `None` nothing follows."""
        self._segments.append(_turn(ActionKind.SEARCH, "query"))
        if text is not None:
            self._segments.append(Observation((2,), text, (Passage("1", "", text),)))
        return self

    def invalid(self):
        self._segments += [_turn(ActionKind.INVALID, ""), Observation((2,), "Use a tag.")]
        return self

    def answer(self, content):
        self._segments.append(_turn(ActionKind.ANSWER, content))
        return self.end(StopReason.ANSWERED)

    def end(self, stop_reason):
        return Trajectory(prompt_ids=(0,), segments=tuple(self._segments), stop_reason=stop_reason)


@pytest.fixture
def episode():
    """A new, empty episode at every call."""
    return Episode
