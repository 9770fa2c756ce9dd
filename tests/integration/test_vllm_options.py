"""What vLLM is told, up to the door of the engine, which is not installed here; docs/options.md names these tests.

TRL's own `VLLMGeneration` runs, with an engine that writes down what it is asked and answers with one search.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

from sorl_trl import SOGRPOTrainer, SOPPOTrainer
from tests.agents import agent_tokenizer, build_agent, native_agent, questions, recorded_policy
from tests.effects import effect
from tests.scripted_vllm import Script, ScriptedLLM, pretend_vllm
from tests.training import settings
from tests.trajectories import FixedRollout, parity_reward, prompts

ENGINE_OPTIONS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "vllm_mode": ("server", "mode", {}),
    "vllm_structured_outputs_regex": ("[a-z]+", "structured_outputs_regex", {}),
    "vllm_server_base_url": ("http://10.0.0.1:1", "server_base_url", {"vllm_mode": "server"}),
    "vllm_server_host": ("10.0.0.1", "server_host", {"vllm_mode": "server"}),
    "vllm_server_port": (8001, "server_port", {"vllm_mode": "server"}),
    "vllm_server_timeout": (3.0, "server_timeout", {"vllm_mode": "server"}),
    "vllm_group_port": (51217, "group_port", {"vllm_mode": "server"}),
    "vllm_tensor_parallel_size": (2, "tensor_parallel_size", {}),
    "vllm_gpu_memory_utilization": (0.5, "gpu_memory_utilization", {}),
    "vllm_max_model_length": (64, "max_model_length", {}),
    "vllm_enable_sleep_mode": (True, "enable_sleep_mode", {}),
    "vllm_model_impl": ("transformers", "model_impl", {}),
}
"""Option -> a value, what `VLLMGeneration` calls it, and other settings under which it counts."""
CORRECTION_OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "vllm_importance_sampling_correction": (False, {}),
    "vllm_importance_sampling_mode": ("token_truncate", {}),
    "vllm_importance_sampling_clip_max": (1.01, {}),
    "vllm_importance_sampling_clip_min": (0.99, {}),
    "vllm_importance_sampling_cap": (1.01, {}),
}
SAMPLING_OPTIONS: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.01,
    "repetition_penalty": 1.3,
    "generation_kwargs": {"presence_penalty": 0.2},
}


class WithoutEngine(vllm_generation.VLLMGeneration):
    """Starts no engine, and has no weights to send to it."""

    def __init__(self, **kwargs: Any) -> None:
        self.given = kwargs
        super().__init__(**kwargs)

    def _init_vllm(self) -> None:
        said = agent_tokenizer()("<search> rome </search>")["input_ids"]
        self.llm = ScriptedLLM(Script(lambda context: said), window=4096)
        modes = {"model_config": {"logprobs_mode": "processed_logprobs"}}
        self.vllm_client = SimpleNamespace(get_server_info=lambda: modes)

    def sync_weights(self) -> None: ...


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", WithoutEngine)
    pretend_vllm(monkeypatch)


@pytest.mark.parametrize("option", ENGINE_OPTIONS)
def test_engine_options(tmp_path: Path, option: str) -> None:
    value, name, others = ENGINE_OPTIONS[option]
    trainer = build_agent(tmp_path, use_vllm=True, **others, **{option: value})
    assert trainer.vllm_generation.given[name] == value


@pytest.mark.parametrize("rollout", ["SearchRollout", "native"])
@pytest.mark.parametrize("option", [*SAMPLING_OPTIONS, "vllm_structured_outputs_regex"])
def test_sampling_options(tmp_path: Path, option: str, rollout: str) -> None:
    """Each turn of a trajectory is asked for alike."""
    value = SAMPLING_OPTIONS.get(option, "[a-z]+")
    if rollout == "SearchRollout":
        trainer = build_agent(tmp_path, use_vllm=True, **{option: value})
    else:
        trainer = native_agent(tmp_path, recorded_policy(), use_vllm=True, **{option: value})
    trainer._generate([row["prompt"] for row in questions(4)])
    asked = trainer.vllm_generation.llm.script.asked
    assert len(asked) == 4 * (3 if rollout == "SearchRollout" else 1)
    for _, parameters in asked:
        if option == "vllm_structured_outputs_regex":
            assert parameters["structured_outputs"].regex == value
        else:
            wanted = value if isinstance(value, dict) else {option: value}
            assert {name: parameters[name] for name in wanted} == wanted


class ScoredRollout(FixedRollout):
    """`FixedRollout` with the log-probabilities that an engine would report."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        logprobs = [[-3.47 + 0.05 * (token % 3 - 1) for token in row] for row in output["completion_ids"]]
        return {**output, "logprobs": logprobs}


@pytest.mark.parametrize("trainer_class", [SOGRPOTrainer, SOPPOTrainer])
@pytest.mark.parametrize("option", CORRECTION_OPTIONS)
@pytest.mark.filterwarnings("ignore:The `vllm_importance_sampling_cap`:FutureWarning")
def test_correction_options(tmp_path: Path, tokenizer: Any, policy: Any, option: str, trainer_class: Any) -> None:
    value, others = CORRECTION_OPTIONS[option]
    size = {"num_generations": 1} if trainer_class is SOPPOTrainer else {}

    def outcome(**overrides: Any) -> dict[str, Any]:
        config = trainer_class.config_class(**settings(tmp_path, use_vllm=True, **size, **others, **overrides))
        weights = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
        model = type(policy)(policy.config)
        model.load_state_dict(weights)
        rollout = ScoredRollout()
        trainer = trainer_class(
            model, parity_reward, config, prompts(16), processing_class=tokenizer, rollout_func=rollout
        )
        return effect(trainer)

    assert outcome() != outcome(**{option: value})
