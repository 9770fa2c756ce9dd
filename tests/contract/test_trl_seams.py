"""The private bodies this package rests on, read in trl 1.16.0 and transformers 5.23.

A change in one of them fails here first, and shows the lines that changed: read them, adapt the override, and run
`python -m tests.trl_seams`. Comments, docstrings and layout do not count.
"""

from __future__ import annotations

import inspect
import re

import pytest
import trl
from sorl_trl.trainers.cycle.trainer import CycleTrainer
from sorl_trl.trainers.loss.micro_batch import IMAGE_INPUTS
from sorl_trl.trainers.seeupo_trainer import SeeUPOTrainer
from trl import GRPOTrainer

from sorl_trl.trainers.base import TurnLevelTrainer
from sorl_trl.trainers.so_grpo_trainer import SOGRPOTrainer
from sorl_trl.trainers.so_ppo_trainer import SOPPOTrainer
from tests.trl_seams import BODIES, FOLDER, OVERRIDDEN, difference, normalized


def test_the_version_is_the_one_that_was_read() -> None:
    assert trl.__version__.startswith("1.16."), "read docs/architecture.md before moving to another minor version"


@pytest.mark.parametrize("name", BODIES)
def test_body_is_the_one_that_was_read(name: str) -> None:
    if changed := difference(name):
        pytest.fail(f"{name} has changed:\n{changed}", pytrace=False)


def test_no_other_bodies_are_kept() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(BODIES)


def test_what_counts_as_a_change() -> None:
    plain = "def f(self, x):\n    return g(x, 1)\n"
    dressed = 'def f(self,\n      x):  # why\n    """What."""\n    # how\n    return g(x,\n             1)\n'
    assert normalized(dressed) == normalized(plain)
    assert normalized(plain.replace("1", "2")) != normalized(plain)


def test_a_change_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def log_metric(self, mode, key, values):  # type: ignore[no-untyped-def]
        self._metrics[mode][key].append(values.mean().item())

    monkeypatch.setitem(BODIES, "GRPOTrainer._log_metric", log_metric)
    lines = difference("GRPOTrainer._log_metric").splitlines()
    assert "+    self._metrics[mode][key].append(values.mean().item())" in lines
    assert any(line.startswith("-    ") for line in lines)


def test_overrides_are_those_listed() -> None:
    """No private method of TRL's is overridden without being pinned here."""
    ours = {
        *vars(CycleTrainer),
        *vars(TurnLevelTrainer),
        *vars(SOGRPOTrainer),
        *vars(SOPPOTrainer),
        *vars(SeeUPOTrainer),
    }
    overridden = {name for name in ours if callable(getattr(GRPOTrainer, name, None)) and name != "__init__"}
    assert overridden == set(OVERRIDDEN)


def test_image_inputs_are_those_of_trls_loss() -> None:
    """Old values come from a pass of ours, which must see the images that the loss will see."""
    in_the_loss = re.findall(r"\w=inputs\.get\(\"(\w+)\"\)", inspect.getsource(GRPOTrainer._compute_loss))
    assert set(in_the_loss) - {"importance_sampling_ratio"} == set(IMAGE_INPUTS)  # vLLM's correction is no input
