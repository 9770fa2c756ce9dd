"""Trains on the same trajectories in one process or several: `python -m tests.unit.experimental.ranks NAME FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from sorl_trl.experimental import GroupRefillConfig, GroupRefillTrainer, SeeUPOConfig, SeeUPOTrainer
from tests.policies import WORDS, build_policy, word_tokenizer
from tests.training import settings
from tests.trajectories import FixedRollout, parity_reward, prompts

ROWS = 24
"""Of a rollout; all are in every update, so that it does not matter how they are shuffled and split."""


class Uneven(FixedRollout):
    """The first half of the trajectories, which are those of the first process of two, have one turn."""

    def _trajectory(self, index: int) -> tuple[list[int], list[int]]:
        self.max_turns = 1 if index % 10_000 < ROWS // 2 else 4
        return super()._trajectory(index)


def agreeing_reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Those of a prompt with an odd number are equal."""
    rewards = parity_reward(completion_ids)
    return [0.5 if int(prompt.split()[0][1:]) % 2 else r for prompt, r in zip(prompts, rewards, strict=True)]


def train(name: str, folder: Path) -> dict[str, Any]:
    """The weights and the logs of two rollouts; the middle one of three groups lies on both processes of two."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    fields: dict[str, Any] = {"per_device_train_batch_size": ROWS // (2 * processes), "num_generations": 8}
    fields |= {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "model_init_kwargs": {"dtype": "auto"}}
    fields |= {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "target_kl": 0.0, "beta": 0.05}
    fields |= {"shuffle_dataset": False, "gradient_checkpointing": False, "epsilon": 0.02}
    trainer_class, config_class, more, reward = {
        "seeupo": (SeeUPOTrainer, SeeUPOConfig, {"num_iterations": 5, "max_steps": 10}, parity_reward),
        "refill": (GroupRefillTrainer, GroupRefillConfig, {"num_iterations": 2, "max_steps": 4}, agreeing_reward),
    }[name]
    trainer = trainer_class(
        str(folder / "policy"), reward, config_class(**settings(folder, **{**fields, **more})), prompts(16),
        processing_class=word_tokenizer(WORDS), rollout_func=Uneven(),
    )  # fmt: skip
    trainer.train()
    weights = {key: value.cpu() for key, value in trainer.accelerator.get_state_dict(trainer.model_wrapped).items()}
    return {"weights": weights, "logs": [log for log in trainer.state.log_history if "loss" in log]}


def write_policy(folder: Path) -> None:
    """A float64 policy, so that no comparison hangs on the order of a sum."""
    build_policy().double().save_pretrained(folder / "policy")


if __name__ == "__main__":
    found = train(sys.argv[1], Path(sys.argv[2]))
    assert torch.distributed.get_world_size() == 2
    if torch.distributed.get_rank() == 0:
        torch.save(found, Path(sys.argv[2]) / "found.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
