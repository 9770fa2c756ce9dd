"""Two processes decide together, and train as one does. A launched process runs this file: see its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sorl_trl import SOGRPOConfig, SOGRPOTrainer
from sorl_trl.experimental import GroupRefillConfig, GroupRefillTrainer
from tests.distributed.cases import BATCH_SIZE, UnevenRollout, agreeing_reward
from tests.model_families import MIXTURES, build
from tests.policies import WORDS, build_policy, word_tokenizer
from tests.training import settings
from tests.trajectories import parity_reward, prompts

pytestmark = pytest.mark.distributed

ROWS = BATCH_SIZE["fixed"]
"""Of a rollout; all are in every update, so that it does not matter how they are shuffled and split."""


class Routed(UnevenRollout):
    """Returns as the engine's routes experts that are known from a token and its place."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        texts = [[*p, *ids] for p, ids in zip(output["prompt_ids"], output["completion_ids"], strict=True)]
        firsts = [[[token + place, token] for place, token in enumerate(text)] for text in texts]
        return {**output, "routes": [(np.array(rows)[..., None] + [0, 1]) % 4 for rows in firsts]}


def train(name: str, folder: Path) -> dict[str, Any]:
    """The weights and the logs of two rollouts; the middle one of three groups lies on both processes of two."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    fields: dict[str, Any] = {"per_device_train_batch_size": ROWS // (2 * processes), "num_generations": 8}
    fields |= {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "model_init_kwargs": {"dtype": "auto"}}
    fields |= {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "target_kl": 0.0, "beta": 0.05}
    fields |= {"shuffle_dataset": False, "gradient_checkpointing": False}
    fields |= {"epsilon": 0.02, "scale_clip_range": False}
    eager = {"dtype": "auto", "experts_implementation": "eager"}  # others have no float64
    replay = {"num_iterations": 2, "max_steps": 4, "model_init_kwargs": eager, "learning_rate": 0.1}
    replay |= {"router_aux_loss_coef": 0.0}  # which depends on how rows are put together
    trainer_class, config_class, more, reward = {
        "refill": (GroupRefillTrainer, GroupRefillConfig, {"num_iterations": 2, "max_steps": 4}, agreeing_reward),
        "r3": (SOGRPOTrainer, SOGRPOConfig, {**replay, "router_replay": "r3"}, parity_reward),
    }[name]
    trainer = trainer_class(
        str(folder / "policy"), reward, config_class(**settings(folder, **{**fields, **more})), prompts(16),
        processing_class=word_tokenizer(WORDS), rollout_func=(Routed if name == "r3" else UnevenRollout)(),
    )  # fmt: skip
    trainer.train()
    weights = {key: value.cpu() for key, value in trainer.accelerator.get_state_dict(trainer.model_wrapped).items()}
    return {"weights": weights, "logs": [log for log in trainer.state.log_history if "loss" in log]}


def launched(name: str, folder: Path) -> Any:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "tests.unit.experimental.test_ranks", name, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ})
    assert (folder / "found.pt").exists(), done.stderr[-4000:]  # processes now and then abort while they exit
    return torch.load(folder / "found.pt", weights_only=True)


@pytest.mark.parametrize("name", ["refill", "r3"])
def test_two_processes_train_as_one(tmp_path: Path, name: str) -> None:
    """One has first turns alone, and goes through the other's later turns with nothing; a group lies on both."""
    policy = build(MIXTURES["mixtral"]) if name == "r3" else build_policy()
    policy.double().save_pretrained(tmp_path / "policy")  # no comparison hangs on the order of a sum
    alone, together = train(name, tmp_path), launched(name, tmp_path)
    for key, weight in alone["weights"].items():
        torch.testing.assert_close(together["weights"][key], weight, rtol=0, atol=1e-6)
    shown = ("groups/refilled", "groups/refill_rounds", "groups/left", "loss")
    for ours, theirs in zip(together["logs"], alone["logs"], strict=True):
        assert {key: ours[key] for key in shown if key in ours} == pytest.approx(
            {key: theirs[key] for key in shown if key in theirs}, abs=1e-6
        )
    if name == "r3":
        assert alone["logs"][-1]["router_replay/rerouted"] > 0.01, "the routers choose the same: a weak test"
    else:
        assert max(log.get("groups/refilled", 0.0) for log in alone["logs"]) > 0.0, "nothing was refilled: a weak test"


if __name__ == "__main__":
    found = train(sys.argv[1], Path(sys.argv[2]))
    assert torch.distributed.get_world_size() == 2
    if torch.distributed.get_rank() == 0:
        torch.save(found, Path(sys.argv[2]) / "found.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
