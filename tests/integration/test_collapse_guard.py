"""Real runs that are driven into collapse, and what each action of the guard does about it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sorl_trl.diagnostics.collapse import DEFAULT_RULES
from tests.agents import NAMES, DownAfter, agent_policy, agent_tokenizer, search_index, teach
from tests.collapses import ALARM, STEPS, guarded, logged


def test_stops_and_saves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, guard = guarded(tmp_path, "stop", save_strategy="steps", save_steps=100)
    trainer.train()
    assert re.search(rf"high_kl: by step {ALARM} `kl_to_old` is \d\.\d+", caplog.text)
    assert [alarm.step for alarm in guard.alarms] == list(logged(trainer, "guard/alarms")) == [ALARM]
    assert trainer.state.global_step == ALARM
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{ALARM}"]
    assert "CollapseGuard stops training" in caplog.text


def test_stops_where_the_search_is_down_for_good(tmp_path: Path) -> None:
    """Batches without a token to train on: the policy searches for what it is asked, and never answers."""
    policy = agent_policy()
    teach(policy, agent_tokenizer(), [f"where {name} <search> {name} </search>" for name in NAMES[:4]])
    fields = {"model": policy, "learning_rate": 1e-6, "top_k": 1, "callbacks": [], "rules": DEFAULT_RULES}
    search = DownAfter(search_index(tmp_path), calls=4)
    trainer, guard = guarded(tmp_path, "stop", search=search, **fields)
    trainer.train()
    shares = logged(trainer, "trajectories_without_turn")
    assert shares[1] == 0.0
    assert list(shares.values())[-2:] == [1.0, 1.0]
    assert trainer.state.global_step < STEPS
    assert [alarm.rule for alarm in guard.alarms] == ["nothing_to_train_on"]
