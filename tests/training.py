"""Short training on fixed trajectories: its settings, its policy, and whether two runs were the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.policies import build_policy
from tests.trajectories import FixedRollout, parity_reward, prompts

IN_FLOAT64: dict[str, Any] = {"model_init_kwargs": {"dtype": "auto"}, "adam_epsilon": 1e-3}
"""For a policy that is saved in float64. Adam multiplies what sums round by 20 at most, and not by two millions."""


def settings(output_dir: Path, **overrides: Any) -> dict[str, Any]:
    """Five updates: four of one generation batch, far enough apart for ratios to be clipped, and one of the next."""
    return {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_iterations": 2,
        "num_generations": 4,
        "max_completion_length": 24,
        "max_steps": 5,
        "learning_rate": 2e-2,
        "epsilon": 0.2,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        **overrides,
    }


def train(trainer_class: Any, config_class: Any, tokenizer: Any, **arguments: Any) -> Any:
    """Train on fixed trajectories, in float64; what is not a field of the config goes to the trainer."""
    to_trainer = {name: arguments.pop(name) for name in ("peft_config", "method") if name in arguments}
    rollout = arguments.pop("rollout_func", None) or FixedRollout()
    if (model := arguments.pop("model", None)) is None:
        model = saved_policy(Path(arguments["output_dir"]), torch.float64)
        arguments |= IN_FLOAT64
    else:
        model.double()
        arguments["adam_epsilon"] = IN_FLOAT64["adam_epsilon"]
    trainer = trainer_class(
        model,
        arguments.pop("reward_funcs", parity_reward),
        config_class(**arguments),
        prompts(),
        processing_class=tokenizer,
        rollout_func=rollout,
        **to_trainer,
    )
    trainer.train()
    return trainer


def assert_same(ours: Any, theirs: Any, skip: str = "per_second") -> None:
    """Equal weights, and equal values of every metric that TRL logs, but for those whose name holds `skip`.

    In float64, because Adam makes other weights of what float32 sums round, which depends on the processor.
    """
    for (name, a), (_, b) in zip(ours.model.named_parameters(), theirs.model.named_parameters(), strict=True):
        assert a.dtype == b.dtype == torch.float64, f"{name}: weights after an optimizer are compared in float64"
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    for our_log, their_log in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        for key, value in their_log.items():
            timing = "time" in key or "per_second" in key
            if not timing and skip not in key and value is not None:
                assert our_log[key] == pytest.approx(value, abs=1e-6, nan_ok=True), key


def saved_policy(folder: Path, dtype: torch.dtype = torch.float32) -> str:
    """A path, because TRL loads the reference policy from where the policy came from."""
    build_policy().to(dtype).save_pretrained(folder / "policy")
    return str(folder / "policy")
