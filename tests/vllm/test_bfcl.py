"""The leaderboard's tasks, sampled by vLLM: in the process, and by a server."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("bfcl_eval")

from datasets import Dataset
from examples.bfcl.environment import BFCLEnvironment
from examples.bfcl.tasks import rows_of, task_of
from transformers import AutoTokenizer

from sorl_trl import AgentRollout, SOGRPOConfig, SOGRPOTrainer
from sorl_trl.qa import environment_reward
from sorl_trl.rollout import EnvironmentResponder, RolloutLimits
from tests.function_callers import talking_policy
from tests.tools import qwen_tokenizer
from tests.training import settings
from tests.vllm import shims
from tests.vllm.policies import GAP, VLLM, load_policy
from tests.vllm.servers import serving

WINDOW = 1024


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_tasks_are_trained_on(tmp_path: Path, mode: str) -> None:
    policy = tmp_path / "policy"
    talking_policy().save_pretrained(policy)
    qwen_tokenizer().save_pretrained(policy)
    options = {**VLLM, "max_completion_length": 300, "max_steps": 4, "learning_rate": 1e-3, "num_iterations": 1}
    if mode == "server":
        with serving(policy, WINDOW, tmp_path / "output.txt") as server:
            trained(tmp_path, policy, vllm_mode="server", vllm_server_base_url=server.url, **_without_mode(options))
    else:
        shims.install()
        trained(tmp_path, policy, vllm_max_model_length=WINDOW, **options)


def _without_mode(options: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in options.items() if name != "vllm_mode"}


def trained(folder: Path, policy: Path, **options: object) -> None:
    rows = rows_of([task_of("multi_turn_base_1:1")], compact=True) * 8
    limits = RolloutLimits(max_turns=5, max_turn_tokens=24, max_observation_tokens=120)
    trainer = SOGRPOTrainer(
        load_policy(policy),
        environment_reward,
        SOGRPOConfig(**settings(folder, **options)),
        Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(policy),
        rollout_func=AgentRollout(EnvironmentResponder(BFCLEnvironment), limits=limits),
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "environment/solved" in entry]
    assert 0.0 < sum(entry["environment/solved"] for entry in logs) / len(logs) < 1.0
    assert logs[0]["rollout/tokens_per_second"] > 0
    assert max(entry[GAP] for entry in logs) < 1e-3
