"""Training says where the time of its rollouts went: as metrics, and in a file that a report draws."""

from __future__ import annotations

from pathlib import Path

import pytest

from sorl_trl.diagnostics.report import main
from sorl_trl.diagnostics.rollout_times import ROLLOUT_FILE, load_rollout_times
from tests.agents import build_agent


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    folder = tmp_path_factory.mktemp("run")
    trainer = build_agent(folder, max_steps=1)
    trainer.train()
    trainer.save_state()
    return Path(trainer.args.output_dir), trainer.state.log_history[0]


def test_metrics_are_those_of_the_file(run: tuple[Path, dict[str, float]]) -> None:
    output_dir, log = run
    times = load_rollout_times(output_dir / ROLLOUT_FILE)
    assert times.rows == 16
    assert {phase for _, phase, _, _ in times.spans} >= {"prefill", "decode"}
    for name in ("seconds_generating", "seconds_searching", "seconds_waiting"):
        assert log[f"rollout/{name}"] == pytest.approx(getattr(times, name), abs=1e-4)
    assert log["rollout/tokens_per_second"] == pytest.approx(times.sampled_tokens / times.seconds, rel=0.02)
    assert times.sampled_tokens / times.rows == pytest.approx(
        log["rollout/tokens_per_turn"] * log["rollout/turns_per_trajectory"], rel=1e-3
    )
    assert 0 < times.seconds_generating <= times.seconds


def test_a_report_draws_it(run: tuple[Path, dict[str, float]], tmp_path: Path) -> None:
    main([str(run[0]), "-o", str(tmp_path)])
    assert (tmp_path / "rollouts.png").read_bytes().startswith(b"\x89PNG")
