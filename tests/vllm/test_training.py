"""Training with a colocated engine: its log-probabilities are what the trainer computes, after real updates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu_check import engines as gpu_check
from benchmarks.gpu_check.checks import Context
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOTrainer

from sorl_trl import SOGRPOConfig, SOGRPOTrainer, SOPPOTrainer
from sorl_trl.rollout import RolloutLimits
from sorl_trl.rollout.engines.server import Sampled
from sorl_trl.rollout.engines.vllm import Submitted, VLLMEngine
from tests.agents import logged
from tests.tools import CALL, lookup, qwen_tokenizer
from tests.training import settings
from tests.vllm.policies import (
    GAP,
    TRAINING,
    VLLM,
    largest_difference,
    load_policy,
    save_policy,
    vllm_agent,
    weights_of,
)
from tests.vllm.shims import model_of

pytestmark = pytest.mark.usefixtures("engines")
EXACT = 1e-4


def train(trainer: Any) -> list[float]:
    """Train; the largest difference of log-probabilities of each rollout. The policy must have moved."""
    before = weights_of(trainer)
    trainer.train()
    assert any((before[name] - now).abs().max() > 1e-3 for name, now in weights_of(trainer).items())
    gaps = logged(trainer, GAP)
    largest_difference(gaps)
    return gaps


@pytest.fixture(params=["colocate", "server"])
def mode(request: Any) -> dict[str, Any]:
    """Settings of the trainer for an engine of its own, or the server."""
    if request.param == "colocate":
        return {"vllm_mode": "colocate"}
    return {"vllm_mode": "server", "vllm_server_base_url": request.getfixturevalue("server")}


def lora(**overrides: Any) -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.0, **overrides)


def test_the_engine_samples_from_the_trained_policy(tmp_path: Path, mode: dict[str, Any]) -> None:
    trainer = vllm_agent(tmp_path, **mode)
    assert max(train(trainer)) < EXACT
    assert max(logged(trainer, "rollout/turns_per_trajectory")) > 1
    assert logged(trainer, "sampling/importance_sampling_ratio/mean") == pytest.approx([1.0] * 4, abs=EXACT)


def test_lora(tmp_path: Path, mode: dict[str, Any]) -> None:
    trainer = vllm_agent(tmp_path, peft_config=lora(), learning_rate=1e-1, **mode)
    assert max(train(trainer)) < EXACT
    assert all("lora" in name for name, p in trainer.model.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("critic", ["head", "model"])
def test_so_ppo_moves_the_policy_and_hides_the_critic(tmp_path: Path, critic: str, engines: list[Any]) -> None:
    trainer = vllm_agent(tmp_path, SOPPOTrainer, critic=critic, critic_warmup_steps=2, num_generations=2)
    sent: set[str] = set()
    iterate = trainer.vllm_generation._iter_named_params
    trainer.vllm_generation._iter_named_params = lambda: ((sent.add(name), (name, p))[1] for name, p in iterate())
    assert max(train(trainer)) < EXACT
    assert logged(trainer, "learning_rate")[1] == 0 < logged(trainer, "learning_rate")[2]
    plain = set(load_policy(tmp_path / "policy").state_dict())
    assert sent == plain < set(trainer.model.state_dict())


def test_our_rollout_with_trls_own_trainer(tmp_path: Path) -> None:
    trainer = vllm_agent(tmp_path, GRPOTrainer)
    assert max(train(trainer)) < EXACT
    assert max(logged(trainer, "rollout/turns_per_trajectory")) > 1


def test_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy of byte tokens calls no tool by itself: half of its first turns are put in its mouth."""
    tokenizer = qwen_tokenizer()
    policy = save_policy(tmp_path / "policy", tokenizer, positions=1024)
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Where is Oslo? {i}"}]} for i in range(8)])
    options = settings(tmp_path / "out", max_completion_length=220, **TRAINING, **VLLM)
    trainer = SOGRPOTrainer(
        load_policy(policy), some_reward, SOGRPOConfig(**options), rows, processing_class=tokenizer, tools=[lookup]
    )
    call_ids = tuple(tokenizer.encode(CALL, add_special_tokens=False))
    finish = VLLMEngine._finish
    contexts: list[str] = []

    def calling(self: Any, request: Submitted, sampled: Sampled) -> Any:
        contexts.append(tokenizer.decode(request.context_ids))
        if request.turn == 0 and request.row % 2:
            logprobs = scored(trainer, [*request.context_ids], [*call_ids])
            sampled = replace(sampled, token_ids=call_ids, logprobs=logprobs, finish_reason="stop")
        return finish(self, request, sampled)

    monkeypatch.setattr(VLLMEngine, "_finish", calling)
    trainer.train()
    assert largest_difference(logged(trainer, GAP)) < EXACT
    assert logged(trainer, "tools/call_frequency") == [0.5] * 4
    assert any("Oslo is in Norway" in context for context in contexts)


def some_reward(completions: Any, **_: Any) -> list[float]:
    return [float(i % 3) for i in range(len(completions))]


def scored(trainer: Any, prompt: list[int], ids: list[int]) -> tuple[float, ...]:
    with torch.no_grad():
        logits = trainer.model.eval()(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    trainer.model.train()
    return tuple(row[token].item() for row, token in zip(logits.log_softmax(-1), ids, strict=True))


def test_a_window_too_short_for_some_ends_their_trajectories_alone(tmp_path: Path) -> None:
    limits = RolloutLimits(max_turns=2, max_turn_tokens=6, max_observation_tokens=6, max_trajectory_tokens=32, top_k=1)
    trainer = vllm_agent(tmp_path, limits=limits, vllm_max_model_length=12)
    assert max(train(trainer)) < EXACT
    shares = logged(trainer, "rollout/stop_reason/context_limit")
    assert 0 < max(shares) < 1
    assert max(logged(trainer, "completions/max_length")) <= 12


def test_a_sleeping_engine_is_woken_and_sent_weights_once_per_rollout(tmp_path: Path, engines: list[Any]) -> None:
    trainer = vllm_agent(tmp_path, vllm_enable_sleep_mode=True)
    syncs: list[int] = []
    sync = trainer.vllm_generation.sync_weights
    trainer.vllm_generation.sync_weights = lambda: (syncs.append(1), sync())
    assert max(train(trainer)) < EXACT
    (llm,) = engines
    assert max(logged(trainer, "turns/per_trajectory")) > 1
    assert len(syncs) == 4
    assert llm.counted == {"sleep": 1 + 4, "wake weights": 4, "wake kv_cache": 4}
    assert all(p.isnan().all() for p in model_of(llm).parameters())


def test_the_check_for_gpus_samples_with_options_that_the_engine_takes(tmp_path: Path) -> None:
    figures = gpu_check.train(Context("cpu", tmp_path), "vllm")
    assert len(figures["logp_difference_means"]) > 1
