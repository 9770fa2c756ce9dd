"""Loads what is evaluated: a checkpoint's folder, a PEFT adapter's folder, or a Hub id."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class ModelArguments:
    """Which policy, and how it is loaded. Those of TRL's `ModelConfig` that do not concern training."""

    model_name_or_path: str = field(metadata={"help": "Checkpoint folder, PEFT adapter folder, or Hub id."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit on the Hub."})
    dtype: str = field(
        default="auto",
        metadata={
            "help": "Of the weights; 'auto' is what they were saved in.",
            "choices": ["auto", "bfloat16", "float16", "float32"],
        },
    )
    attn_implementation: str | None = field(default=None, metadata={"help": "Attention implementation to use."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that the checkpoint brings along."})


def load_tokenizer(model: ModelArguments) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer; its base model's for an adapter's folder that has none."""
    folder = Path(model.model_name_or_path)
    adapter = folder / "adapter_config.json"
    if adapter.is_file() and not (folder / "tokenizer_config.json").is_file():
        config = json.loads(adapter.read_bytes())
        base, revision = config["base_model_name_or_path"], config.get("revision") or "main"
        model = replace(model, model_name_or_path=base, model_revision=revision)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        model.model_name_or_path, revision=model.model_revision, trust_remote_code=model.trust_remote_code
    )
    return tokenizer


def load_model(model: ModelArguments, device: torch.device) -> PreTrainedModel:
    """The policy, in evaluation mode; where the checkpoint is an adapter, upon its base model."""
    policy: Any = AutoModelForCausalLM.from_pretrained(
        model.model_name_or_path,
        revision=model.model_revision,
        dtype=model.dtype,
        attn_implementation=model.attn_implementation,
        trust_remote_code=model.trust_remote_code,
    )
    loaded: PreTrainedModel = policy.to(device).eval()
    return loaded


def message_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that end a message, as in training: the tokenizer's end-of-sequence token and the checkpoint's."""
    configured: Any = model.generation_config and model.generation_config.eos_token_id
    ends = configured if isinstance(configured, list) else [configured]
    return sorted({token_id for token_id in (tokenizer.eos_token_id, *ends) if token_id is not None})


def files_hash(checkpoint: str) -> str | None:
    """Changes with a folder that is trained on, without reading gigabytes; None where there is no such folder."""
    files = sorted(path for path in Path(checkpoint).glob("*") if path.is_file())
    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()[:16] if states else None
