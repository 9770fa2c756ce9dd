from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sorl_trl.evaluation.view import main, take_evenly, write_page
from sorl_trl.evaluation.view_data import EVALUATION, TRAINING, Entry
from sorl_trl.rollout.trained import write_trained

from .test_view_data import TRAINED, write_evaluation
from .test_view_page import ENTRY, Parsed, content
from .trajectories import answered, evaluated, question


def entries(**sizes: int) -> list[Entry]:
    return [replace(ENTRY, key=f"{group}/{n}", group=group) for group, size in sizes.items() for n in range(size)]


class TestTakeEvenly:
    def test_what_a_small_group_does_not_need_goes_to_the_others(self) -> None:
        kept, totals = take_evenly(entries(nq=9, bamboogle=1, musique=4), 8)
        assert [entry.key for entry in kept] == [
            *(f"nq/{n}" for n in range(4)),
            "bamboogle/0",
            *(f"musique/{n}" for n in range(3)),
        ]
        assert totals == {"nq": 9, "bamboogle": 1, "musique": 4}

    @given(st.dictionaries(st.sampled_from("abcde"), st.integers(1, 9)), st.integers(1, 50))
    def test_no_room_is_wasted_and_order_is_kept(self, sizes: dict[str, int], limit: int) -> None:
        every = entries(**sizes)
        kept, totals = take_evenly(every, limit)
        assert len(kept) == min(limit, len(every))
        assert [entry for entry in every if entry in kept] == kept
        assert totals.total() == len(every)


class TestWritePage:
    def test_of_an_evaluation(self, tmp_path: Path) -> None:
        write_evaluation(tmp_path / "eval-mine", evaluated(question("Ada"), answered("Ada", searches=2)))
        page = write_page(tmp_path / "eval-mine", tmp_path / "page.html")
        assert (page.kind, page.title, page.total) == (EVALUATION, "Trajectories of eval-mine", 1)
        found = content(Parsed((tmp_path / "page.html").read_text("utf-8")))
        assert [entry["key"] for entry in found["trajectories"]] == ["nq/q/0"]
        assert found["notes"] == ["The evaluation is not finished: its finished batches are here."]

    def test_of_training(self, tmp_path: Path) -> None:
        write_trained(tmp_path, 10, 0, [TRAINED])
        assert write_page(tmp_path, tmp_path / "page.html", title="Mine \udcff").kind == TRAINING
        parsed = Parsed((tmp_path / "page.html").read_text("utf-8"))
        assert content(parsed)["trajectories"][0]["segments"][0]["tokens"]["clipped"] == "ioc"
        assert [text for _, text in parsed.all("title")] == ["Mine ?"]

    def test_what_is_left_out_is_said(self, tmp_path: Path) -> None:
        write_trained(tmp_path, 10, 0, [TRAINED] * 5)
        page = write_page(tmp_path, tmp_path / "page.html", limit=2)
        note = "3 of 5 trajectories are left out (--limit): of each dataset or step the first are here."
        assert page.notes == [note]
        found = content(Parsed((tmp_path / "page.html").read_text("utf-8")))
        assert (len(found["trajectories"]), found["notes"]) == (2, [note])

    def test_an_old_page_stays_if_the_new_one_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_trained(tmp_path, 10, 0, [TRAINED])
        (tmp_path / "page.html").write_text("old")
        monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            write_page(tmp_path, tmp_path / "page.html")
        assert (tmp_path / "page.html").read_text() == "old"
        assert not list(tmp_path.glob(".page*"))

    @pytest.mark.parametrize("limit", [0, -1])
    def test_a_limit_is_at_least_1(self, tmp_path: Path, limit: int) -> None:
        with pytest.raises(ValueError, match=f"--limit must be at least 1, got {limit}"):
            write_page(tmp_path, tmp_path / "page.html", limit=limit)

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
        write_trained(tmp_path, 10, 0, [TRAINED] * 3)
        output = tmp_path / "page.html"
        main([str(tmp_path), "-o", str(output), "--title", "Mine", "--limit", "2"])
        assert capsys.readouterr().out == f"2 of 3 trajectories: {output}\n"
        assert "<title>Mine</title>" in output.read_text("utf-8")

    def test_an_error_is_a_sentence(self, tmp_path: Path) -> None:
        with pytest.raises(SystemExit, match=r"^error: .* holds neither"):
            main([str(tmp_path), "-o", str(tmp_path / "page.html")])
