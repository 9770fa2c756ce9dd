"""Runs of SO-PPO, in one process or two: the same trajectories, rewards and optimizer steps in both."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PrinterCallback

from sorl_trl import SOPPOConfig, SOPPOTrainer
from tests.agents import NAMES, agent_tokenizer
from tests.distributed.cases import BATCH_SIZE, UnevenRollout
from tests.policies import build_policy
from tests.trajectories import turn_reward

STEPS, STEPS_PER_ROLLOUT = 4, 2
SAVED_STEP = 2
"""Where a run that is resumed starts: the end of a rollout's steps."""
CHECKPOINTING = {"off": None, "non-reentrant": False, "reentrant": True}
"""Gradient checkpointing, and what PyTorch calls `use_reentrant`."""


@dataclass(frozen=True)
class PPOCase:
    """One training run. It travels to the worker as JSON."""

    name: str
    critic: str
    lora: bool = False
    checkpointing: str = "off"
    dtype: str = "float32"
    micro_batches: int = 2
    is_ready: bool = False
    """Whether the policy is a PEFT model, and not a path."""
    is_started: bool = False
    """Whether the critic starts from the one in `start/`."""
    is_resumed: bool = False
    """Whether a second run goes on from step `SAVED_STEP`, and a third one finds no critic there."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further fields of `SOPPOConfig`."""

    @property
    def kind(self) -> str:
        return f"{self.critic}-{'lora' if self.lora else 'full'}"


@dataclass(frozen=True)
class PPOLaunch:
    """Cases that one launch runs one after the other: most of its time goes into starting."""

    folder: str
    """Holds `policy/` and `start/`, a critic for each kind; takes a folder for each case."""
    cases: list[PPOCase]


HEAD, MODEL = PPOCase("head-full", "head"), PPOCase("model-full", "model")
ADAPTER = PPOCase("adapter-lora", "adapter", lora=True)
HEAD_LORA, MODEL_LORA = PPOCase("head-lora", "head", lora=True), PPOCase("model-lora", "model", lora=True)
KINDS = [HEAD, MODEL, ADAPTER, HEAD_LORA, MODEL_LORA]

# At the end of the clip range, bfloat16's rounding decides about the whole gradient of a turn.
UNCLIPPED = {"epsilon": 10.0, "value_clip_range": None}
TOKEN_LEVEL = {"advantage_level": "token", "loss_type": "grpo", "importance_sampling_level": "token"}
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3, "critic_learning_rate": None}


def cell(case: PPOCase, checkpointing: str, dtype: str) -> PPOCase:
    """One kind of critic with one kind of gradient checkpointing, in float32 or bfloat16."""
    name = f"{case.kind}/{checkpointing}/{dtype}"
    options = UNCLIPPED if dtype == "bfloat16" else {}
    return replace(case, name=name, checkpointing=checkpointing, dtype=dtype, options=options)


VARIANTS = [
    replace(ADAPTER, name="adapter-lora/token", micro_batches=1, options=TOKEN_LEVEL),
    replace(HEAD, name="head-full/token", micro_batches=1, options=TOKEN_LEVEL),
    replace(ADAPTER, name="adapter-lora/warm-up", options={"critic_warmup_steps": 2}),
    replace(MODEL, name="model-full/sync", options={"sync_ref_model": True, "ref_model_sync_steps": 2}),
    replace(ADAPTER, name="adapter-lora/no-reference", options={"beta": 0.0}),
    replace(ADAPTER, name="adapter-lora/ready", is_ready=True),
]
"""Options that take other ways through the engines than the defaults do."""
CLIPPED = [replace(case, name=f"{case.kind}/clipped", options={"max_grad_norm": 0.05}) for case in (HEAD, MODEL)]
"""Policy and critic apart; both gradients are longer."""
STARTED = [replace(case, name=f"{case.kind}/started", is_started=True) for case in KINDS]
RESUMED = [replace(case, name=f"{case.kind}/resumed", is_resumed=True, options=ADAMW) for case in KINDS]
"""With an optimizer that has a state to restore."""


def write_policy(folder: Path) -> None:
    """A policy of two layers, with weights that bfloat16 holds exactly."""
    config = build_policy().config
    config.num_hidden_layers = 2
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().float().save_pretrained(folder)
    agent_tokenizer().save_pretrained(folder)


def different_prompts() -> Dataset:
    """One for each trajectory of all rollouts, so that a run is one epoch."""
    count = BATCH_SIZE["fixed"] * STEPS // STEPS_PER_ROLLOUT
    return Dataset.from_list([{"prompt": f"{NAMES[i % 8]} {NAMES[i // 8]}"} for i in range(count)])


def build_trainer(case: PPOCase, folder: Path) -> SOPPOTrainer:
    """The trainer of this process. Its share of the batch follows from the number of processes."""
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    args = build_config(case, folder)
    path = folder / "policy"
    torch.manual_seed(0)  # of the adapter's weights
    trainer = SOPPOTrainer(
        ready_policy(case, path, lora) if case.is_ready else str(path),
        turn_reward,
        args,
        different_prompts(),
        processing_class=AutoTokenizer.from_pretrained(path),
        peft_config=lora if case.lora and not case.is_ready else None,
        rollout_func=UnevenRollout(),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def ready_policy(case: PPOCase, path: Path, lora: LoraConfig) -> PeftModel:
    """PEFT makes the adapter float32, whatever the dtype of the model below."""
    return get_peft_model(AutoModelForCausalLM.from_pretrained(path, dtype=case.dtype), lora)


def start_of(case: PPOCase, folder: Path) -> Path:
    return folder / "start" / case.kind / f"checkpoint-{STEPS}" / "critic"


def build_config(case: PPOCase, folder: Path) -> SOPPOConfig:
    """Two rollouts, and two optimizer steps on each: the second one's ratios and values leave the clip ranges."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    use_reentrant = CHECKPOINTING[case.checkpointing]
    fields: dict[str, Any] = {
        "output_dir": str(folder / case.name),
        "critic": case.critic,
        "per_device_train_batch_size": BATCH_SIZE["fixed"] // (case.micro_batches * processes),
        "gradient_accumulation_steps": case.micro_batches,
        "num_iterations": STEPS_PER_ROLLOUT,
        "max_steps": STEPS,
        "max_completion_length": 32,
        "gamma": 0.9,
        "gae_lambda": 0.8,
        "beta": 0.05,
        # Linear in the gradient, where Adam would blow up rounding differences.
        "optim": "sgd",
        "learning_rate": 3.0 if case.lora else 1.0,
        "target_kl": 0.0,  # test_resume.py has it
        "value_head_learning_rate": 2.0,
        # A head divides the gradient by the length of the hidden state and by the root of its size.
        "critic_learning_rate": {"head": None, "adapter": 100.0, "model": 20.0}[case.critic],
        "max_grad_norm": 100.0,  # clips nothing: DeepSpeed would clip by another norm than the others
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": use_reentrant is not None,
        "gradient_checkpointing_kwargs": None if use_reentrant is None else {"use_reentrant": use_reentrant},
        "model_init_kwargs": None if case.is_ready else {"dtype": case.dtype},
        "bf16": case.dtype == "bfloat16",
        "shuffle_dataset": False,
        "logging_steps": 1,
        "critic_model_name_or_path": str(start_of(case, folder)) if case.is_started else None,
        "save_strategy": "steps" if case.is_resumed else "no",
        "save_steps": SAVED_STEP,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return SOPPOConfig(**{**fields, **case.options})
