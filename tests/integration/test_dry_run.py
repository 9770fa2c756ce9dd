"""`train.py --dry_run`: how it describes a step, what it finds, and that it leaves nothing behind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import train

from sorl_trl.command_line import run_command
from tests.interrupts import make_world, training_words


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy that searches now and then, eight questions, and a corpus with its index."""
    folder = tmp_path_factory.mktemp("dry_run")
    make_world(folder)
    return folder


def words(folder: Path, *more: str, **changed: Any) -> list[str]:
    own = {"config": "so_grpo", "index": folder / "index", "corpus": None, "num_generations": 4, "num_iterations": 3}
    own |= {"steps_per_generation": 2, "max_steps": None, **changed}
    return [*training_words(folder, **own), *more, "--dry_run"]


def dry_run(capsys: pytest.CaptureFixture[str], words: list[str], code: int = 0) -> str:
    """What it prints; or, where it must fail, its one line."""
    assert run_command(train.main, words) == code
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    return shown.err.splitlines()[-1] if code else shown.out


def place(completions: Any, **_: Any) -> list[float]:
    return [float(i) for i in range(len(completions))]


def group(completions: Any, **_: Any) -> list[float]:
    return [float(i // 4) for i in range(len(completions))]


def nothing(completions: Any, **_: Any) -> list[None]:
    return [None] * len(completions)


@pytest.mark.parametrize(
    ("reward", "trainer", "shown", "caveat"),
    [
        ("group", "so_grpo", "reward 0.5", "frac_reward_zero_std"),
        ("group", "so_ppo", "reward 0.5", None),
        ("exact_match", "so_ppo", "reward 0", "frac_reward_zero_std"),
        ("nothing", "so_grpo", "reward nan", "no trajectory"),
    ],
)
def test_it_says_if_rewards_teach_nothing(
    folder: Path, reward: str, trainer: str, shown: str, caveat: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    name = reward if reward == "exact_match" else f"{__name__}.{reward}"
    lines = dry_run(capsys, words(folder, trainer=trainer, rewards=name)).splitlines()
    assert f"           {shown}" in lines
    assert lines[-1].startswith(f"Ready to train into {folder / 'out'}{', but' if caveat else '.'}")
    assert caveat is None or caveat in lines[-1]


@pytest.mark.parametrize("trainer", ["so_grpo", "so_ppo"])
def test_what_a_step_will_do(folder: Path, trainer: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(folder.rglob("*"))
    shown = dry_run(capsys, words(folder, trainer=trainer, rewards=f"{__name__}.place"))
    lines = {line[:10].strip(): line[11:] for line in shown.splitlines() if not line.startswith(" ")}
    assert lines["trainer"] == f"{trainer}, all weights of {folder / 'policy'}"
    assert lines["method"] == trainer
    assert "ratio      Ratio(level='turn', average='geometric')" in shown
    assert re.search(r"\n {11}at most, while training +0\.\d\d GiB\n", shown)
    assert lines["rollout"] == "16 trajectories = 4 questions x 4, for 6 updates, on 1 process"
    assert lines["rehearsal"] == "2 questions x 4 trajectories"
    assert "rollout/stop_reason/" in shown
    assert "prompt      where " in shown
    assert shown.splitlines()[-1] == f"Ready to train into {folder / 'out'}."
    assert sorted(folder.rglob("*")) == before, "nothing is written"


LONG = "where {question} " + "rome " * 2100


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"prompt_template": LONG}, "the longest prompt has 2102 tokens, but the model has 2048"),
        ({"use_vllm": "true"}, "vLLM"),
        ({"report_to": "wandb"}, "`report_to` needs wandb"),
        ({"load_in_4bit": "true"}, "bitsandbytes"),
        ({"optim": "adamw_bnb_8bit"}, "`optim` needs bitsandbytes"),
        ({"output_dir": "policy"}, "`output_dir`"),
    ],
)
def test_why_it_cannot_train(
    changed: dict[str, Any], reason: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr("sorl_trl.cli.arguments.find_spec", lambda module: None)
    monkeypatch.chdir(folder)
    line = dry_run(capsys, words(folder, **changed), code=2)
    assert line.startswith("error: ") and reason in line


def test_rollouts_ahead_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = dry_run(capsys, words(folder, async_staleness=1))
    assert "engine     copies of the policy, slots\n" in shown
    assert "copies for async rollouts" in shown and "rollout/stop_reason/" in shown
