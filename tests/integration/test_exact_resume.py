"""A resumed run continues exactly: same losses, same trajectories, same weights as without the interruption."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from sorl_trl import SOGRPOTrainer, SOPPOTrainer
from sorl_trl.command_line import UserMistake
from sorl_trl.search import BM25Index
from tests.agents import agent_policy, agent_tokenizer, build_agent, search_index, steps_after
from tests.policies import build_moe_policy

STEPS = 9
CYCLES: dict[str, dict[str, Any]] = {
    # A cycle of 4 optimizer steps, an epoch of 8; the KL lowers the learning rate.
    "reused": {
        **{"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 1},
        "target_kl": 1e-4,
    },
    # A cycle of 2 optimizer steps, an epoch of 4.
    "accumulated": {"num_iterations": 1, "steps_per_generation": 4, "gradient_accumulation_steps": 2},
    # Every batch is used once, and nothing has to be kept, an epoch of 4.
    "on_policy": {"num_iterations": 1, "steps_per_generation": 1, "gradient_accumulation_steps": 1},
}


def build(folder: Path, trainer_class: Any = SOGRPOTrainer, **overrides: Any) -> Any:
    """A trainer with real sampling, in which random numbers matter; 4 groups of two prompts make an epoch."""
    folder.mkdir(exist_ok=True)
    index = folder / "index"
    search = BM25Index.load(index) if index.exists() else search_index(folder)
    fields = {"per_device_train_batch_size": 4, "num_generations": 2, "max_steps": STEPS, "save_strategy": "steps"}
    fields |= {"save_steps": 1, "learning_rate": 1e-2, "logging_steps": 1}
    return build_agent(folder, search, trainer_class, **{**fields, **overrides})


@pytest.mark.parametrize(
    ("trainer_class", "cycle"),
    [
        pytest.param(SOGRPOTrainer, "reused", marks=pytest.mark.slow),
        (SOGRPOTrainer, "accumulated"),
        (SOPPOTrainer, "reused"),
        pytest.param(SOPPOTrainer, "on_policy", marks=pytest.mark.slow),
    ],
)
def test_every_checkpoint_continues_exactly(tmp_path: Path, trainer_class: Any, cycle: str) -> None:
    whole = build(tmp_path / "whole", trainer_class, **CYCLES[cycle])
    whole.train()
    weights = whole.model.state_dict()
    assert whole.state.epoch > 1
    assert cycle != "reused" or min(log.get("lr_factor", 1.0) for log in whole.state.log_history) < 1
    for step in (3, 8):  # within a cycle, at the end of an epoch
        resumed = build(tmp_path / f"from-{step}", trainer_class, **{**CYCLES[cycle], "save_steps": 100})
        resumed.train(resume_from_checkpoint=str(_checkpoint(whole, step)))
        ours, theirs = (steps_after(step, trainer.state.log_history) for trainer in (resumed, whole))
        assert ours == theirs, f"resumed after step {step}"
        assert_equal(resumed.model.state_dict(), weights)


def moe_policy() -> Any:
    """Its checkpoints have other names than it has in memory."""
    return build_moe_policy(vocab_size=len(agent_tokenizer()))


def half_adapter() -> Any:
    """PEFT loads its checkpoints in float32."""
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules="all-linear")
    return get_peft_model(agent_policy().bfloat16(), config, autocast_adapter_dtype=False)


@pytest.mark.parametrize(("policy", "trainer_class"), [(moe_policy, SOGRPOTrainer), (half_adapter, SOPPOTrainer)])
def test_what_is_loaded_otherwise_continues_exactly(tmp_path: Path, policy: Any, trainer_class: Any) -> None:
    """Also where the best checkpoint is loaded."""
    fields = {**CYCLES["reused"], "max_steps": 3}
    whole = build(tmp_path / "whole", trainer_class, model=policy(), **fields)
    whole.train()
    weights = copies(whole.model)
    whole.state.best_model_checkpoint = str(_checkpoint(whole, 2))
    whole._load_best_model()
    resumed = build(tmp_path / "resumed", trainer_class, model=policy(), **fields)
    resumed._load_from_checkpoint(str(_checkpoint(whole, 2)))
    assert_equal(resumed.model.state_dict(), copies(whole.model))
    resumed.train(resume_from_checkpoint=str(_checkpoint(whole, 2)))
    assert_equal(resumed.model.state_dict(), weights)


def copies(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert weight.dtype == theirs[name].dtype and torch.equal(weight, theirs[name]), name


def _checkpoint(trainer: Any, step: int) -> Path:
    return Path(trainer.args.output_dir) / f"checkpoint-{step}"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Within a cycle."""
    trainer = build(tmp_path / "first", **CYCLES["reused"], max_steps=3)
    trainer.train()
    return _checkpoint(trainer, 3)


@pytest.mark.parametrize(
    ("trainer_class", "options"), [(SOGRPOTrainer, {}), (SOGRPOTrainer, {"async_staleness": 1}), (SOPPOTrainer, {})]
)
def test_a_finished_run_stays_as_it_is(tmp_path: Path, trainer_class: Any, options: dict[str, Any]) -> None:
    options = {**CYCLES["reused"], **options, "max_steps": 3}
    first, again = (build(tmp_path / name, trainer_class, **options) for name in ("first", "again"))
    first.train()
    again.train(resume_from_checkpoint=str(_checkpoint(first, 3)))
    assert again.state.global_step == 3
    assert again.rollout_examples is None, "nothing was sampled"
    assert_equal(again.model.state_dict(), first.model.state_dict())


def test_what_does_not_fit_the_cycle(tmp_path: Path, checkpoint: Path) -> None:
    """Other batches are refused, but for a cycle that is finished, and so is another number of processes."""
    second = build(tmp_path / "second", **{**CYCLES["reused"], "num_iterations": 3}, max_steps=6)
    with pytest.raises(ValueError, match="`num_iterations` is 3, but was 2"):
        second.train(resume_from_checkpoint=str(checkpoint))
    path = checkpoint / "generation_cycle_0.pt"
    state = torch.load(path, weights_only=True)
    torch.save({**state, "buffered_inputs": None}, path)
    second.train(resume_from_checkpoint=str(checkpoint))
    assert second.state.global_step == 6
    torch.save({**state, "world_size": 2}, path)
    with pytest.raises(ValueError, match="`world_size` is 1, but was 2"):
        build(tmp_path / "third", **CYCLES["reused"]).train(resume_from_checkpoint=str(checkpoint))


def test_a_warning_tells_that_trls_checkpoint_continues_with_new_trajectories(
    tmp_path: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (checkpoint / "generation_cycle_0.pt").unlink()
    trainer = build(tmp_path / "second", **CYCLES["reused"], max_steps=4)
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert sum("new trajectories" in each for each in caplog.messages) == 1


CHANGED = {"learning_rate": 0.5, "value_head_learning_rate": 0.4, "weight_decay": 0.3}
CHANGED |= {"adam_beta1": 0.2, "adam_beta2": 0.1, "adam_epsilon": 0.6}


def test_what_the_optimizer_holds_goes_on_and_is_reported_as_it_acts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = build(tmp_path / "first", SOPPOTrainer, **CYCLES["on_policy"], max_steps=1)
    first.train()
    resumed = build(tmp_path / "second", SOPPOTrainer, **CYCLES["on_policy"], **CHANGED, max_steps=3, save_steps=3)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=str(_checkpoint(first, 1)))
    for name in CHANGED:
        assert f"`{name}` {getattr(first.args, name)}" in caplog.text
        assert getattr(resumed.args, name) == getattr(first.args, name)
    groups = {bool(group.get("critic")): group for group in resumed.optimizer.param_groups}
    assert groups[False]["initial_lr"] == first.args.learning_rate
    assert groups[False]["betas"] == (first.args.adam_beta1, first.args.adam_beta2)
    assert (groups[False]["eps"], groups[False]["weight_decay"]) == (first.args.adam_epsilon, first.args.weight_decay)
    assert groups[True]["initial_lr"] == first.args.value_head_learning_rate
    assert not _checkpoint(resumed, 2).is_dir(), "checkpoints are saved as this run is told"


def test_an_optimizer_of_the_same_state_goes_on(tmp_path: Path, checkpoint: Path) -> None:
    for optim in ("adamw_torch", "adamw_torch_fused"):
        resumed = build(tmp_path / optim, **CYCLES["reused"], max_steps=4, optim=optim)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert resumed.state.global_step == 4
    with pytest.raises(UserMistake, match="`optim`"):
        build(tmp_path / "other", **CYCLES["reused"], optim="adafactor").train(resume_from_checkpoint=str(checkpoint))
