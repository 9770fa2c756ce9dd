"""A policy whose attention heads are as wide as vLLM's CPU kernels want them, and trainers around it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import PreTrainedTokenizerFast

from sorl_trl import SOGRPOTrainer
from sorl_trl.trainers.vllm_policy import PolicyGeneration, used_by_trl
from tests.agents import agent_tokenizer, build_agent
from tests.vllm import shims

WINDOW = 48
"""Positions of a policy, and so what vLLM reads of it."""
VLLM = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "token_truncate",
}
TRAINING = {"num_iterations": 1, "max_steps": 8, "learning_rate": 1e-2}
"""Four rollouts, and two optimizer steps on each."""
GAP = "sampling/sampling_logp_difference/max"


def save_policy(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast | None = None,
    positions: int = WINDOW,
    sharpness: float = 1.0,
    seed: int = 0,
    family: str = "Llama",
    **more: Any,
) -> Path:
    """A random policy as a checkpoint, for vLLM reads its own from one: two layers, two heads of 32.

    It samples about uniformly; with a higher `sharpness` its greedy continuations are more varied. `more` is for the
    config of its family.
    """
    tokenizer = tokenizer or agent_tokenizer()
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=more.pop("num_hidden_layers", 2),
        num_attention_heads=2,
        max_position_embeddings=positions,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **more,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        model.lm_head.weight *= sharpness
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter *= 12  # so that the choice of experts in later layers hangs on these
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load_policy(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def vllm_agent(folder: Path, trainer_class: Any = SOGRPOTrainer, **overrides: Any) -> Any:
    """`build_agent` with a policy of its own that vLLM samples from."""
    policy = folder / "policy"
    if not policy.exists():
        save_policy(policy)
    return build_agent(folder, trainer_class=trainer_class, model=load_policy(policy), **VLLM | TRAINING | overrides)


def wrap(policy: Path, routes: bool = False, **arguments: Any) -> Any:
    """TRL's wrapper, greedy, with the weights of the policy sent; with `routes`, vLLM in this process reports them."""
    shims.install()
    settings = {"max_model_length": WINDOW, "max_num_seqs": 32, "gpu_memory_utilization": 0.3, "temperature": 0.0}
    model, accelerator = load_policy(policy), Accelerator(cpu=True)
    with used_by_trl(routes):
        wrapper = PolicyGeneration(model, accelerator, agent_tokenizer(), **settings, **arguments)
    wrapper.sync_weights()
    return wrapper


def largest_difference(gaps: list[float]) -> float:
    """Of four rollouts."""
    assert len(gaps) == 4
    return max(gaps)


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def each_mode(request: Any, policy: Path) -> Iterator[Any]:
    """For a fixture whose parameter is the mode: TRL's wrapper, shut down afterwards."""
    if request.param == "server":
        yield wrap(policy, mode="server", server_base_url=request.getfixturevalue("server"))
        return
    wrapper = wrap(policy)
    yield wrapper
    wrapper.llm.llm_engine.engine_core.shutdown()
    AcceleratorState._reset_state(reset_partial_state=True)  # it counts on the process group that vLLM has ended
