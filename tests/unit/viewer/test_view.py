from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sorl_trl.command_line import UserMistake
from sorl_trl.records.trained import Shard, write_trained
from sorl_trl.viewer.command import main, take_evenly, write_page
from sorl_trl.viewer.data import EVALUATION, TRAINING, Entry, Group
from sorl_trl.viewer.page import embed
from tests.unit.evaluation.trajectories import answered, evaluated, question
from tests.unit.viewer.entries import ENTRY, TRAINED, Parsed, content, write_evaluation

A_LOT = 10**9
NUMBERED = replace(ENTRY, key="a/0", group="a")
BYTES = len(embed(vars(NUMBERED)))
"""Of each entry that `groups` makes; its groups have names of one letter."""


def groups(log: list[str] | None = None, **sizes: int) -> list[Group]:
    """What is read of them, and that it is let go, is put down in `log`."""
    log = [] if log is None else log
    return [Group(name, size, partial(numbered, name, size, log)) for name, size in sizes.items()]


def numbered(group: str, size: int, log: list[str]) -> Iterator[Entry]:
    try:
        for n in range(size):
            log.append(f"{group}/{n}")
            yield replace(ENTRY, key=log[-1], group=group)
    finally:
        log.append("closed")


def keys(kept: list[Entry]) -> str:
    return " ".join(entry.key for entry in kept)


class TestTakeEvenly:
    def test_what_a_small_group_does_not_need_goes_to_the_others(self) -> None:
        kept = take_evenly(groups(a=9, b=1, c=4), 8, A_LOT)
        assert keys(kept) == "a/0 a/1 a/2 a/3 b/0 c/0 c/1 c/2"

    @given(st.dictionaries(st.sampled_from("abcde"), st.integers(0, 9)), st.integers(1, 50))
    def test_no_room_is_wasted_and_order_is_kept(self, sizes: dict[str, int], limit: int) -> None:
        every = [entry for group in groups(**sizes) for entry in group.read()]
        kept = take_evenly(groups(**sizes), limit, A_LOT)
        assert len(kept) == min(limit, len(every))
        assert [entry for entry in every if entry in kept] == kept

    def test_bytes_are_shared_too_and_what_is_left_goes_to_the_later_groups(self) -> None:
        assert keys(take_evenly(groups(a=9, b=1, c=9), 100, 9 * BYTES)) == "a/0 a/1 a/2 b/0 c/0 c/1 c/2 c/3 c/4"
        assert keys(take_evenly(groups(a=9, b=9), 100, 4 * BYTES - 1)) == "a/0 b/0 b/1"

    def test_what_is_not_kept_is_not_read_but_for_the_first_that_is_too_large(self) -> None:
        of_both: list[str] = []
        by_number, by_size = groups(of_both, a=9, b=9), groups(of_both, a=9, b=9)
        take_evenly(by_number, 4, A_LOT)
        assert of_both == ["a/0", "a/1", "closed", "b/0", "b/1", "closed"], "one file at a time"
        of_both.clear()
        take_evenly(by_size, 100, 4 * BYTES)
        assert of_both == ["a/0", "a/1", "a/2", "closed", "b/0", "b/1", "b/2", "closed"]

    def test_one_is_kept_whatever_its_size(self) -> None:
        assert keys(take_evenly(groups(a=9, b=9), 100, 1)) == "a/0"

    @given(st.dictionaries(st.sampled_from("abcde"), st.integers(0, 9), min_size=1), st.integers(1, 50))
    def test_the_bound_in_bytes_holds(self, sizes: dict[str, int], room: int) -> None:
        assert len(take_evenly(groups(**sizes), 100, room * BYTES)) <= room


class TestWritePage:
    def test_of_an_evaluation(self, tmp_path: Path) -> None:
        write_evaluation(tmp_path / "eval-mine", evaluated(question("Ada"), answered("Ada", searches=2)))
        page = write_page(tmp_path / "eval-mine", tmp_path / "page.html")
        assert (page.kind, page.title, page.total) == (EVALUATION, "Trajectories of eval-mine", 1)
        found = content(Parsed((tmp_path / "page.html").read_text("utf-8")))
        assert [entry["key"] for entry in found["trajectories"]] == ["nq/q/0"]
        assert found["notes"] == ["The evaluation is not finished: its finished batches are here."]

    def test_of_training(self, tmp_path: Path) -> None:
        write_trained(tmp_path, Shard(10, 0, 2), [TRAINED])
        assert write_page(tmp_path, tmp_path / "page.html", title="Mine \udcff").kind == TRAINING
        parsed = Parsed((tmp_path / "page.html").read_text("utf-8"))
        assert content(parsed)["trajectories"][0]["segments"][0]["tokens"]["clipped"] == "ioc"
        assert [text for _, text in parsed.all("title")] == ["Mine ?"]

    def test_what_is_left_out_is_said(self, tmp_path: Path) -> None:
        write_trained(tmp_path, Shard(10, 0, 2), [TRAINED] * 5)
        page = write_page(tmp_path, tmp_path / "page.html", limit=2)
        note = "3 of 5 trajectories are left out (--limit): of each dataset or step the first are here."
        assert page.notes == [note]
        found = content(Parsed((tmp_path / "page.html").read_text("utf-8")))
        assert (len(found["trajectories"]), found["notes"]) == (2, [note])

    def test_a_page_is_bounded_in_bytes_and_says_of_which_steps_nothing_is_left(self, tmp_path: Path) -> None:
        for step in (10, 20):
            write_trained(tmp_path, Shard(step, 0, 2), [replace(TRAINED, step=step, prompt="x" * 600_000)] * 2)
        page = write_page(tmp_path, tmp_path / "page.html", megabytes=1)
        assert [entry.key for entry in page.entries] == ["step-10/1"]
        bound = "3 of 4 trajectories are left out (--megabytes)"
        assert page.notes == [f"{bound}: of each dataset or step the first are here, of 1 none."]
        assert len(write_page(tmp_path, tmp_path / "page.html", megabytes=3).entries) == 4

    def test_an_old_page_stays_if_the_new_one_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_trained(tmp_path, Shard(10, 0, 2), [TRAINED])
        (tmp_path / "page.html").write_text("old")
        monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            write_page(tmp_path, tmp_path / "page.html")
        assert (tmp_path / "page.html").read_text() == "old"
        assert not list(tmp_path.glob(".page*"))

    @pytest.mark.parametrize("name", ["limit", "megabytes"])
    @pytest.mark.parametrize("value", [0, -1])
    def test_a_bound_is_at_least_1(self, tmp_path: Path, name: str, value: int) -> None:
        with pytest.raises(ValueError, match=f"--{name} must be at least 1, got {value}"):
            write_page(tmp_path, tmp_path / "page.html", **{name: value})

    def test_an_output_that_cannot_be_written(self, tmp_path: Path) -> None:
        with pytest.raises(IsADirectoryError, match="must be a file"):
            write_page(tmp_path, tmp_path)
        with pytest.raises(FileNotFoundError, match=r"no folder .*missing"):
            write_page(tmp_path, tmp_path / "missing" / "page.html")

    def test_a_run_without_a_finished_batch(self, tmp_path: Path) -> None:
        (tmp_path / "settings.json").write_text('{"datasets": {"nq": "hash"}}')
        with pytest.raises(ValueError, match="no trajectory yet"):
            write_page(tmp_path, tmp_path / "page.html")


class TestMain:
    def test_it_says_what_it_wrote(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write_trained(tmp_path, Shard(10, 0, 2), [TRAINED] * 3)
        output = tmp_path / "page.html"
        main([str(tmp_path), "-o", str(output), "--title", "Mine", "--limit", "2"])
        assert capsys.readouterr().out == f"2 of 3 trajectories: {output}\n"
        assert "<title>Mine</title>" in output.read_text("utf-8")

    def test_an_error_is_a_sentence(self, tmp_path: Path) -> None:
        with pytest.raises(UserMistake, match=r" holds neither"):
            main([str(tmp_path), "-o", str(tmp_path / "page.html")])
