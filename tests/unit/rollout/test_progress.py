"""What a terminal shows of a rollout under way, and that nothing else shows it."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tqdm.std import tqdm
from transformers import ProgressCallback

from sorl_trl.diagnostics.callbacks import TurnProgressCallback
from sorl_trl.rollout import Collector, SearchResponder, progress
from sorl_trl.rollout.progress import RolloutBar
from tests.agents import build_agent, questions

from .fakes import FakeSearch, SteppingEngine, word_tokenizer
from .test_collector import PROTOCOL


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def shown(self) -> list[tuple[str, ...]]:
        """Of each time that the bar was drawn: the trajectories that had ended, all, and tokens a second."""
        return re.findall(r"rollout: (\d+)/(\d+) trajectories, ([\d,]+) tokens/s", self.getvalue())


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Where bars are drawn, whenever they change."""
    file = Terminal()
    draw_on(file, monkeypatch)
    return file


def draw_on(file: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = {"file": file, "delay": 0, "mininterval": 0, "ncols": 200}
    monkeypatch.setattr(progress, "tqdm", lambda **given: tqdm(**{**given, **at_once}))


def arguments(disable_tqdm: bool = False, process_index: int = 0) -> Any:
    return SimpleNamespace(disable_tqdm=disable_tqdm, process_index=process_index)


def test_one_bar_for_all_rollouts_under_way(terminal: Terminal) -> None:
    bar = RolloutBar(arguments())
    one, other = bar.begin(4), bar.begin(2)
    one(1, 1000.0)
    other(0, 500.0)
    assert terminal.shown[-1] == ("1", "6", "1,500")
    other(2, 600.0)
    assert terminal.shown[-1] == ("1", "4", "1,000"), "the other one has ended"
    one(4, 900.0)
    assert terminal.shown[-1] == ("4", "4", "900")
    bar.begin(3)(0, 0.0)
    assert terminal.shown[-1] == ("0", "3", "0"), "the next one is drawn from its start"
    bar.close()
    drawn = terminal.getvalue()
    one(2, 1.0)
    assert terminal.getvalue() == drawn, "a thread may outlive its run"


@pytest.mark.parametrize("args", [arguments(disable_tqdm=True), arguments(process_index=1)])
def test_nothing_is_drawn_that_nobody_wants(terminal: Terminal, args: Any) -> None:
    bar = RolloutBar(args)
    bar.begin(2)(1, 10.0)
    bar.close()
    assert terminal.getvalue() == ""


def test_nothing_is_drawn_into_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    draw_on(file, monkeypatch)
    bar = RolloutBar(arguments())
    bar.begin(2)(1, 10.0)
    bar.close()
    assert file.getvalue() == ""


def test_every_end_is_told() -> None:
    responder, told = SearchResponder(FakeSearch(), PROTOCOL), list[tuple[int, float]]()
    responder.open([{}] * 9)
    engine = SteppingEngine(["<search> capital of France </search>", "<answer> Paris </answer>", "I should <eos>"])
    collector = Collector(word_tokenizer(), responder, PROTOCOL)
    trajectories = collector.run([(row,) for row in range(9)], engine, progress=lambda *now: told.append(now))
    ended = [each for each, _ in told]
    assert ended == sorted(ended) and len({*ended}) > 3, "they end one after the other"
    assert ended[-1] == 9 == len(trajectories)
    assert told[-1][1] > 0


@pytest.mark.trains
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_script_shows_rollouts_and_a_compact_line(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    sizes = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "async_staleness": staleness}
    trainer = build_agent(tmp_path, disable_tqdm=False, eval_dataset=questions(4), **sizes)
    trainer.train()
    assert ("8", "8") in [each[:2] for each in terminal.shown]
    assert "reward=" in terminal.getvalue() and "kl=" in terminal.getvalue()
    assert "grad_norm" not in terminal.getvalue(), "not a line of all metrics"
    drawn = terminal.getvalue()
    trainer.args.disable_tqdm = True
    trainer.evaluate()
    assert "rollout" not in terminal.getvalue()[len(drawn) :]


def test_a_users_own_bar_stays(tmp_path: Path) -> None:
    class Own(ProgressCallback):
        pass

    trainer = build_agent(tmp_path, callbacks=[Own()], disable_tqdm=False)
    shown = [type(each) for each in trainer.callback_handler.callbacks if isinstance(each, ProgressCallback)]
    assert shown == [Own, TurnProgressCallback]
