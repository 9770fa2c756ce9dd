"""Rows that do not wait for each other: when they are answered, when replies rejoin, what is left behind."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_trl.rollout import (
    Collector,
    Generation,
    Reply,
    Responder,
    RetryPolicy,
    RolloutLimits,
    SearchResponder,
    TagProtocol,
    TurnRequest,
)
from sorl_trl.search import SearchError, SearchUnavailable
from sorl_trl.types import Passage, StopReason, Trajectory

from .fakes import FakeSearch, SteppingEngine, check_rows, encode, word_tokenizer

PROTOCOL = TagProtocol(passage_template="{text}", no_results="No", search_failed="No", invalid_feedback="I should")
LIMITS = RolloutLimits(max_turns=4, max_turn_tokens=9, max_observation_tokens=8, max_trajectory_tokens=60)
SEARCH = "<search> capital of France </search>"
TURNS = [
    SEARCH,
    "I should <search> Paris </search>",
    "I I I I <search> Doc </search> found",
    "<answer> Paris </answer>",
    "I should <eos>",
    "I I I I I I I I I I I",
]
NO_WAIT = RetryPolicy(attempts=1)


class Jittery:
    """Finds what depends on the query, after a while; some queries it refuses."""

    thread_safe = True

    def __init__(self, seed: int, longest_s: float, refused: str | None = None) -> None:
        self.random = random.Random(seed)
        self.longest_s = longest_s
        self.refused = refused

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        time.sleep(self.random.random() * self.longest_s)
        if self.refused in queries:
            raise SearchError("refused")
        return [[Passage(query, "", f"{query} France", 1.0)] for query in queries]


def collector(search: Any, rejoin_after: int = 4) -> Collector:
    responder = search if isinstance(search, Responder) else SearchResponder(search, PROTOCOL, retry=NO_WAIT)
    return Collector(word_tokenizer(), responder, PROTOCOL, LIMITS, rejoin_after)


def collect(search: Any, rejoin_after: int, rows: int = 12, engine: SteppingEngine | None = None) -> list[Trajectory]:
    engine = engine or SteppingEngine(TURNS)
    trajectories = collector(search, rejoin_after).collect([(row % 5, row) for row in range(rows)], engine)
    check_rows(trajectories)
    assert sorted(engine.released) == list(range(rows)) and not engine.is_open and engine.idle
    return trajectories


@pytest.mark.parametrize("rejoin_after", [0, 1, 4, 9, 1000])
def test_how_long_a_search_takes_changes_nothing(rejoin_after: int) -> None:
    reference = collect(Jittery(0, 0.0), rejoin_after)
    assert sum(len(trajectory.turns) for trajectory in reference) > 24
    for seed, longest_s in ((1, 0.001), (2, 0.004)):
        assert collect(Jittery(seed, longest_s), rejoin_after) == reference


class Held(Responder):
    """Replies when it is told to, or at once with `reply`, which may be an error."""

    def __init__(self, reply: Any = None) -> None:
        self.reply, self.asked = reply, dict[int, Future[Reply]]()

    def ask(self, turns: Any) -> dict[int, Future[Reply]]:
        self.asked.update({row: Future() for row in turns})
        for row in turns if self.reply else ():
            is_error = isinstance(self.reply, BaseException)
            (self.asked[row].set_exception if is_error else self.asked[row].set_result)(self.reply)
        return {row: self.asked[row] for row in turns}


class Scripted(SteppingEngine):
    """Row r takes the turns `scripts[r]`; `on_poll` is called with each poll's number, before it."""

    def __init__(self, scripts: Sequence[Sequence[str]], on_poll: Any = lambda poll: None) -> None:
        super().__init__([])
        self.scripts = [iter(script) for script in scripts]
        self.on_poll = on_poll
        self.polls = 0
        self.submitted: list[tuple[int, int]] = []

    def submit(self, request: TurnRequest) -> None:
        self.submitted.append((self.polls, request.row))
        self.rows[request.row] = (encode(word_tokenizer(), next(self.scripts[request.row])), request.limit, [])

    def poll(self) -> list[tuple[int, Generation]]:
        self.polls += 1
        self.on_poll(self.polls)
        return super().poll()


LONG = "I I I I I <answer> Paris </answer>"
SHORT = "<answer> Paris </answer>"


@pytest.mark.parametrize("early", [Reply("Paris"), None], ids=["early", "late"])
def test_a_reply_rejoins_after_so_many_polls(early: Reply | None) -> None:
    """The search ends with poll 5; the other row goes on until poll 8."""
    held = Held(early)
    late = threading.Timer(0.05, lambda: held.asked[0].set_result(Reply("Paris")))
    engine = Scripted([[SEARCH, SHORT], [LONG]], lambda poll: late.start() if poll == 6 and not early else None)
    (first, _) = collector(held, rejoin_after=2).collect([(1,), (2,)], engine)
    assert engine.submitted == [(0, 0), (0, 1), (7, 0)]
    assert first.observations[0].text == "<information> Paris </information>"


def test_a_rollout_that_waits_for_a_reply_can_be_ended() -> None:
    """By `any_active`, which raises once the row is away."""
    held = Held()

    def any_active(active: bool) -> bool:
        return 1 / (0 if held.asked else 1) > 0

    with pytest.raises(ZeroDivisionError):
        collector(held).collect([(1,)], Scripted([[SEARCH]]), any_active)


def test_an_engine_that_loses_a_turn_is_reported() -> None:
    engine = Scripted([[SEARCH], [LONG]], lambda poll: engine.rows.clear())
    with pytest.raises(RuntimeError, match=r"not returned the turns of rows \[0, 1\]"):
        collector(FakeSearch()).collect([(1,), (2,)], engine)


def until_called(search: FakeSearch) -> Any:
    """Before the fourth poll: the first search, of the turns that ended with the third, is under way."""

    def wait(poll: int) -> None:
        while poll == 4 and not search.calls:
            time.sleep(0.001)

    return wait


def test_a_failing_search_masks_its_row_and_no_other() -> None:
    """Row 1 is the first to search."""
    search = FakeSearch([SearchUnavailable("down")])
    engine = Scripted([[SEARCH, SHORT], ["<search> Paris </search>"], [LONG]], until_called(search))
    trajectories = collector(search).collect([(1,), (2,), (3,)], engine)
    assert [t.stop_reason.value for t in trajectories] == ["answered", "search_unavailable", "answered"]
    assert [any(each.env_mask) for each in trajectories] == [True, False, True]


@pytest.mark.parametrize("found", [None, [None], {"a": []}, [[{"text": "t"}]], []])
def test_what_is_not_a_passage_is_reported(found: Any) -> None:
    search = FakeSearch()
    search.search_batch = lambda queries, k: found  # type: ignore[method-assign]
    with pytest.raises(
        RuntimeError, match=r"must return a list of `Passage` for each query|returned 0 results for 1 queries"
    ):
        SearchResponder(search).search("a")


def test_an_environment_rewards_turns_and_ends_trajectories() -> None:
    engine = Scripted([[SEARCH, SHORT]])
    (trajectory,) = collector(Held(Reply("Paris", reward=0.5))).collect([(1,)], engine)
    assert [turn.reward for turn in trajectory.turns] == [0.5, None]
    assert trajectory.stop_reason is StopReason.ANSWERED
    done = Reply("Paris", reward=1, stop=StopReason.ENVIRONMENT_DONE)
    (trajectory,) = collector(Held(done)).collect([(1,)], Scripted([[SEARCH]]))
    assert (trajectory.stop_reason, trajectory.turns[0].reward) == (StopReason.ENVIRONMENT_DONE, 1.0)
    assert trajectory.observations == ()


@pytest.mark.parametrize("error", [ZeroDivisionError("a mistake"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_what_an_environment_raises_ends_the_rollout_and_leaves_nothing_behind(error: BaseException) -> None:
    engine, held = Scripted([[SEARCH], [LONG]]), Held(error)
    with pytest.raises(type(error)):
        collector(held).collect([(1,), (2,)], engine)
    assert not engine.is_open
    engine.scripts = [iter([SHORT]), iter([SHORT])]  # the next rollout is sound
    held.reply = Reply("Paris")
    engine.rows = {}
    assert len(collector(held).collect([(1,), (2,)], engine)) == 2


class Threaded(FakeSearch):
    """Remembers who calls it."""

    def __init__(self, thread_safe: bool) -> None:
        super().__init__()
        self.thread_safe = thread_safe
        self.callers: set[threading.Thread] = set()

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        self.callers.add(threading.current_thread())
        time.sleep(0.01)
        return super().search_batch(queries, k)


def test_an_engine_that_is_not_thread_safe_has_one_caller_for_ever() -> None:
    search = Threaded(thread_safe=False)
    responder = SearchResponder(search, PROTOCOL)
    for _ in range(3):
        threading.Thread(target=time.sleep, args=(0.02,)).start()  # or an ended thread's number might come again
        collect(responder, 2)
    (caller,) = search.callers
    assert caller is not threading.main_thread() and caller.is_alive()
    del responder
    gc.collect()
    caller.join(5)
    assert not caller.is_alive()


def test_after_retries_in_vain_the_rest_of_the_rollout_tries_once_each() -> None:
    search = FakeSearch([SearchUnavailable("down")] * 100)
    responder = SearchResponder(search, PROTOCOL, retry=RetryPolicy(attempts=3, initial_wait_s=0.0, max_wait_s=0.0))
    scripts = [["<search> Paris </search>"], [SEARCH], ["I I I I <search> Doc </search>"]]
    for calls in (3 + 1 + 1, 2 * (3 + 1 + 1)):  # the next rollout is patient again
        engine = Scripted(scripts, lambda poll: time.sleep(0.02))
        trajectories = collector(responder).collect([(1,), (2,), (3,)], engine)
        assert {trajectory.stop_reason for trajectory in trajectories} == {StopReason.SEARCH_UNAVAILABLE}
        assert len(search.calls) == calls


class Server(Scripted):
    """Ends turns when it is told to, in whatever order."""

    in_steps = False

    def __init__(self, scripts: Sequence[Sequence[str]], order: Sequence[int]) -> None:
        super().__init__(scripts)
        self.order = iter(order)
        self.waking = threading.Event()

    def poll(self) -> list[tuple[int, Generation]]:
        row = next(self.order)
        if row not in self.rows:  # its reply has not rejoined yet
            assert self.waking.wait(10), "nobody has woken the engine"
            self.waking.clear()
            return []
        ids, *_ = self.rows.pop(row)
        return [(row, Generation(ids, None, True))]

    def wake(self) -> None:
        self.waking.set()


def test_a_server_is_given_replies_as_they_come() -> None:
    engine = Server([[SEARCH, SHORT], [LONG]], order=[0, 0, 0, 1])
    trajectories = collector(FakeSearch(), rejoin_after=100).collect([(1,), (2,)], engine)
    assert [len(trajectory.turns) for trajectory in trajectories] == [2, 1]


class Forgetful(SearchResponder):
    """Replies to the first of the rows that it is asked for."""

    def ask(self, turns: Any) -> Any:
        return dict([*super().ask(turns).items()][:1])


def test_a_row_that_a_responder_leaves_out_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"rows \[0\].* rows \[0, 1\]"):
        collector(Forgetful(FakeSearch(), PROTOCOL)).collect([(1,), (2,)], Scripted([[SEARCH, SHORT]] * 2))


scripts = st.lists(st.lists(st.sampled_from(TURNS), min_size=5, max_size=5), min_size=1, max_size=5)


@settings(max_examples=100, deadline=None)
@given(scripts, st.integers(0, 6), st.sampled_from([None, "Paris", "capital of France"]))
def test_each_row_goes_as_it_would_alone(scripts: list[list[str]], rejoin_after: int, refused: str | None) -> None:
    search = Jittery(0, 0.0, refused)
    prompts = [(row,) for row in range(len(scripts))]
    together = collector(search, rejoin_after).collect(prompts, Scripted(scripts))
    for row, trajectory in enumerate(together):
        (alone,) = collector(search, 0).collect([prompts[row]], Scripted([scripts[row]]))
        assert alone.stop_reason is trajectory.stop_reason
        assert [each.token_ids for each in alone.segments] == [each.token_ids for each in trajectory.segments]
