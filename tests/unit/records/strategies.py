"""Evaluated trajectories of every kind, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from sorl_trl.evaluation import MEASURES
from sorl_trl.qa import Question
from sorl_trl.records.evaluated import EvaluatedTrajectory
from sorl_trl.types import Action, ActionKind, Observation, Passage, StopReason, Trajectory, Turn

TEXT = st.text(max_size=8)
IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4).map(tuple)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
ACTIONS = st.builds(Action, st.sampled_from(ActionKind), TEXT) | st.builds(
    Action, st.just(ActionKind.TOOL), TEXT, TEXT
)
LOGPROBS = st.none() | st.lists(FLOATS, max_size=3).map(tuple)
TURNS = st.builds(Turn, IDS, TEXT, ACTIONS, LOGPROBS, st.none() | FLOATS)
PASSAGES = st.builds(Passage, TEXT, TEXT, TEXT, st.none() | FLOATS)
OBSERVATIONS = st.builds(
    Observation, IDS, TEXT, st.lists(PASSAGES, max_size=2).map(tuple), st.booleans(), st.integers(0, 9)
)
TRAJECTORIES = st.builds(
    Trajectory, IDS, st.lists(TURNS | OBSERVATIONS, max_size=4).map(tuple), st.sampled_from(StopReason)
)
QUESTIONS = st.builds(
    Question,
    TEXT,
    TEXT,
    st.lists(TEXT, min_size=1, max_size=3).map(tuple),
    st.dictionaries(TEXT, TEXT | st.integers() | st.lists(TEXT), max_size=2),
    data_source=TEXT,
)
MEASURED = st.fixed_dictionaries(dict.fromkeys(MEASURES, st.none() | FLOATS))
EVALUATED = st.builds(EvaluatedTrajectory, TEXT, QUESTIONS, st.integers(0, 99), TEXT, TRAJECTORIES, MEASURED)
