from __future__ import annotations

import pytest

from sorl_trl.types import Action, ActionKind, Observation, Passage, StopReason, Trajectory, Turn


def _turn(kind, content):
    return Turn(token_ids=(1,), text="", action=Action(kind, content))


def _observation(text, passages):
    return Observation(token_ids=(2,), text=text, passages=tuple(Passage("1", "", passage) for passage in passages))


class Episode:
    """Puts a trajectory together, step by step."""

    def __init__(self):
        self._segments = []

    def search(self, text="", passages=None):
        """A search; `passages` is by default one, shown as `text`. With `None` for `text` nothing follows."""
        self._segments.append(_turn(ActionKind.SEARCH, "query"))
        if text is not None:
            self._segments.append(_observation(text, [text] if passages is None else passages))
        return self

    def invalid(self, text="Use a tag.", passages=()):
        self._segments += [_turn(ActionKind.INVALID, ""), _observation(text, passages)]
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
