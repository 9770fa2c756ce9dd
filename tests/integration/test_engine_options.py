"""Options of the rollout's engine reach it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sorl_trl import AgentRollout, SearchRollout
from sorl_trl.rollout import Collector, EngineOptions, HFGenerator, SearchResponder, SlotEngine
from sorl_trl.sandbox import PROTOCOL
from sorl_trl.search import NoSearch
from sorl_trl.trainers.turns.spans import checked_rollout
from tests.agents import LIMITS, build_agent


def test_a_responder_says_itself_how_many_threads_it_has() -> None:
    with pytest.raises(ValueError, match=r"engine\.search_concurrency=2 is for `SearchRollout`: a SearchResponder"):
        AgentRollout(SearchResponder(NoSearch()), engine=EngineOptions(search_concurrency=2))


@pytest.mark.parametrize("engine", ["auto", "slots", "lockstep"])
def test_the_engine_is_the_one_named(tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    trainer = build_agent(tmp_path, NoSearch(), max_steps=1)
    trainer.rollout_func = checked_rollout(
        SearchRollout(NoSearch(), PROTOCOL, LIMITS, engine=EngineOptions(rollout_engine=engine))
    )
    generate = HFGenerator.generate
    monkeypatch.setattr(HFGenerator, "generate", lambda *args: calls.append(args) or generate(*args))
    trainer.train()
    assert bool(calls) == (engine == "lockstep")


def test_options_of_the_engine_reach_the_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    collect = Collector.collect
    monkeypatch.setattr(Collector, "collect", lambda self, *args: seen.append(self) or collect(self, *args))
    trainer = build_agent(tmp_path, NoSearch(), max_steps=1)
    opened: list[Any] = []
    open_engine = SlotEngine.open
    monkeypatch.setattr(SlotEngine, "open", lambda self, rows: opened.append(self) or open_engine(self, rows))
    engine = EngineOptions(rejoin_after=1, search_concurrency=1, kv_cache_gib=0.25)
    trainer.rollout_func = checked_rollout(SearchRollout(NoSearch(), PROTOCOL, LIMITS, engine=engine))
    trainer.train()
    assert {(each.rejoin_after, each.responder._concurrency) for each in seen} == {(1, 1)}
    assert {each._budget for each in opened} == {2**28}
