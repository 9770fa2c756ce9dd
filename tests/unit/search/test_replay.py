from __future__ import annotations

import json
import logging
import pickle
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.search.backends import FakeSearch, LosingSearch, found

from sorl_trl.search import SearchError, SearchUnavailable
from sorl_trl.search.around.replay import NotRecorded, RecordingError, RecordingSearch, ReplayedSearch
from sorl_trl.search.around.retry import RetryingSearch, RetryPolicy
from sorl_trl.types import Passage


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "searches.jsonl"


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_recording_answers_without_the_engine(path: Path) -> None:
    recording = RecordingSearch(FakeSearch(), path)
    assert recording.search_batch(["a", "bc"], 3) == [found("a", 3), found("bc", 3)]
    assert recording.search_batch(["bc"], 1) == [found("bc", 1)]
    assert recording.recorded == 3
    replayed = ReplayedSearch(path)
    assert replayed.search_batch(["bc", "a", "bc"], 3) == [found("bc", 3), found("a", 3), found("bc", 3)]
    assert replayed.search_batch(["bc"], 1) == [found("bc", 1)]


def test_a_line_is_there_before_the_caller_has_the_answer(path: Path) -> None:
    RecordingSearch(FakeSearch(), path).search_batch(["a"], 1)
    passage = {"id": "a-0", "title": "A", "text": "a of 1", "score": 1 / 3}
    assert lines(path) == [{"query": "a", "k": 1, "passages": [passage]}]
    assert path.read_bytes().endswith(b"\n")


texts = st.text(st.characters())  # halves of surrogate pairs included


@settings(deadline=None, max_examples=50)
@given(
    found=st.lists(
        st.builds(Passage, texts, texts, texts, st.none() | st.floats(allow_nan=False)),
        max_size=3,
    ),
    query=texts,
)
def test_passages_and_scores_come_back_exactly(tmp_path_factory, found: list[Passage], query: str) -> None:
    path = tmp_path_factory.mktemp("replay") / "searches.jsonl"

    class Constant(FakeSearch):
        def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
            return [found for _ in queries]

    RecordingSearch(Constant(), path).search_batch([query], 3)
    assert ReplayedSearch(path).search_batch([query], 3) == [found]


@pytest.mark.parametrize("request_", [(["c"], 3), (["a", "c"], 3), (["a"], 2), (["A"], 3)])
def test_what_was_not_searched_is_named(path: Path, request_: tuple[list[str], int]) -> None:
    RecordingSearch(FakeSearch(), path).search_batch(["a", "b"], 3)
    queries, k = request_
    with pytest.raises(NotRecorded, match=f"searches.jsonl: .* no search for '{queries[-1]}' with k={k}$") as caught:
        ReplayedSearch(path).search_batch(queries, k)
    assert isinstance(caught.value, KeyError)


def test_a_refusal_is_replayed(path: Path) -> None:
    recording = RecordingSearch(FakeSearch([SearchError("too long")]), path)
    with pytest.raises(SearchError):
        recording.search_batch(["a"], 3)
    recording.search_batch(["b"], 3)
    replayed = ReplayedSearch(path)
    for queries in (["a"], ["b", "a"]):
        with pytest.raises(SearchError, match=r"^too long$"):
            replayed.search_batch(queries, 3)
    assert replayed.search_batch(["b"], 3) == [found("b", 3)]


def test_a_batch_that_is_refused_says_nothing_of_its_queries(path: Path) -> None:
    recording = RecordingSearch(FakeSearch([SearchError("one is bad")]), path)
    with pytest.raises(SearchError):
        recording.search_batch(["a", "b"], 3)
    assert recording.recorded == 0
    recording.search_batch(["c"], 3)
    with pytest.raises(NotRecorded):
        ReplayedSearch(path).search_batch(["a"], 3)


def test_an_outage_is_replayed(path: Path) -> None:
    recording = RecordingSearch(FakeSearch([SearchUnavailable("down")]), path)
    with pytest.raises(SearchUnavailable):
        recording.search_batch(["a", "b"], 3)
    assert recording.recorded == 2
    with pytest.raises(SearchUnavailable, match=r"^down$"):
        ReplayedSearch(path).search_batch(["b"], 3)


def test_an_answer_counts_more_than_outages_around_it(path: Path) -> None:
    down = SearchUnavailable("down")
    backend = FakeSearch([down, down])
    recording = RecordingSearch(backend, path)
    RetryingSearch(recording, RetryPolicy(initial_wait_s=0)).search_batch(["a"], 3)
    backend.failures = [down]
    with pytest.raises(SearchUnavailable):
        recording.search_batch(["a"], 3)
    assert [sorted(line)[-1] for line in lines(path)] == ["unavailable", "unavailable", "query", "unavailable"]
    assert ReplayedSearch(path).search_batch(["a"], 3) == [found("a", 3)]


def test_bugs_of_the_backend_are_not_recorded(path: Path) -> None:
    with pytest.raises(KeyError):
        RecordingSearch(FakeSearch([KeyError("bug")]), path).search_batch(["a"], 3)
    with pytest.raises(RuntimeError, match="1 results for 2 queries"):
        RecordingSearch(LosingSearch(), path).search_batch(["a", "b"], 3)
    assert path.read_bytes() == b""


def test_an_unfinished_last_line_is_left_out(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    RecordingSearch(FakeSearch(), path).search_batch(["a", "b"], 3)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in (first + 1, len(whole) - 20, len(whole) - 1):
        path.write_bytes(whole[:end])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            replayed = ReplayedSearch(path)
        assert "searches.jsonl, line 2: unfinished, left out" in caplog.text
        assert replayed.search_batch(["a"], 3) == [found("a", 3)]
        with pytest.raises(NotRecorded):
            replayed.search_batch(["b"], 3)


@pytest.mark.parametrize("torn", [b'{"query": "x', b"{" * 200_000])
@pytest.mark.parametrize("whole", [0, 2])
def test_a_recording_goes_on_after_a_kill(
    path: Path, torn: bytes, whole: int, caplog: pytest.LogCaptureFixture
) -> None:
    RecordingSearch(FakeSearch(), path).search_batch(list("ab")[:whole], 3)
    with path.open("ab") as file:
        file.write(torn)
    with caplog.at_level(logging.WARNING):
        recording = RecordingSearch(FakeSearch(), path)
    assert f"{len(torn)} bytes of an unfinished last line are cut" in caplog.text
    recording.search_batch(["c"], 3)
    assert [line["query"] for line in lines(path)] == [*list("ab")[:whole], "c"]


def test_a_recording_is_appended_to(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for query in "ab":
        RecordingSearch(FakeSearch(), path).search_batch([query], 3)
    assert ReplayedSearch(path).search_batch(["b", "a"], 3) == [found("b", 3), found("a", 3)]
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[1]", "must be a JSON object, got list"),
        ('{"k": 3, "passages": []}', "string `query` .* got None and 3"),
        ('{"query": "a", "k": "3", "passages": []}', "integer `k`, got 'a' and '3'"),
        ('{"query": "a", "k": 3}', "passages must be a list, got NoneType"),
        ('{"query": "a", "k": 3, "passages": [3]}', "not a passage"),
        ('{"query": "a", "k": 3, "passages": [{"id": "1"}]}', "not a passage"),
        (
            '{"query": "a", "k": 3, "passages": [{"id": 1, "title": "", "text": "", "score": null}]}',
            "`id` must be a string",
        ),
        (
            '{"query": "a", "k": 3, "passages": [{"id": "1", "title": "", "text": null, "score": null}]}',
            "`text` must be a string, got None",
        ),
        (
            '{"query": "a", "k": 3, "passages": [{"id": "1", "title": "", "text": "", "score": "1.5"}]}',
            "`score` must be a number or null, got '1.5'",
        ),
        (
            '{"query": "a", "k": 3, "passages": [{"id": "1", "title": "", "text": "", "score": true}]}',
            "`score` must be a number or null, got True",
        ),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_bad_line_is_named(path: Path, line: str, message: str) -> None:
    good = '{"query": "a", "k": 3, "passages": []}'
    path.write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(RecordingError, match=f"searches.jsonl, line 2: .*{message}"):
        ReplayedSearch(path)


def test_a_missing_recording_is_named(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"searches\.jsonl"):
        ReplayedSearch(path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        RecordingSearch(FakeSearch(), path.parent / "nowhere" / "searches.jsonl")


def test_threads_share_a_recording(path: Path) -> None:
    recording = RecordingSearch(FakeSearch(), path)
    start = threading.Barrier(8, timeout=20)

    def ask(number: int) -> None:
        start.wait()
        for i in range(50):
            recording.search_batch([f"{number}-{i}" * 50, "x"], 3)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queries = [f"{number}-{i}" * 50 for number in range(8) for i in range(50)]
    assert recording.recorded == len(lines(path)) == 800
    assert ReplayedSearch(path).search_batch(queries, 3) == [found(query, 3) for query in queries]


@pytest.mark.parametrize("content", ["", '{"query": "x'])
def test_an_empty_recording_is_refused(path: Path, content: str) -> None:
    path.write_text(content)
    with pytest.raises(RecordingError, match=r"searches\.jsonl: the recording is empty"):
        ReplayedSearch(path)


def test_a_request_out_of_range_is_named(path: Path) -> None:
    RecordingSearch(FakeSearch(), path).search_batch(["a"], 3)
    with pytest.raises(ValueError, match="`k` is 0, but must be a whole number, at least 1"):
        ReplayedSearch(path).search_batch([], 0)


def test_a_copy_appends_to_the_same_file(path: Path) -> None:
    recording = RecordingSearch(FakeSearch(), path)
    copy = pickle.loads(pickle.dumps(recording))
    recording.search_batch(["a"], 3)
    copy.search_batch(["b"], 3)
    assert [line["query"] for line in lines(path)] == ["a", "b"]
    assert pickle.loads(pickle.dumps(ReplayedSearch(path))).search_batch(["b"], 3) == [found("b", 3)]
