"""Loads the policy of an evaluation: a checkpoint's folder, a PEFT adapter's folder, or a Hub id."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import has_file
from transformers.utils.peft_utils import find_adapter_config_file

from sorl_trl.checks import OneOf, check_fields

DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass
class ModelArguments:
    """Which policy to evaluate, and how to load it: the fields of TRL's `ModelConfig` that do not concern training."""

    model_name_or_path: str = field(metadata={"help": "Checkpoint folder, PEFT adapter folder, or Hub id."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit on the Hub."})
    dtype: Annotated[str, OneOf(DTYPES)] = field(
        default="auto",
        metadata={"help": f"Data type of the weights: {', '.join(DTYPES)}. 'auto' takes the one they were saved in."},
    )
    attn_implementation: str | None = field(default=None, metadata={"help": "Attention implementation to use."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the checkpoint."})

    def __post_init__(self) -> None:
        check_fields(self)


def load_tokenizer(model: ModelArguments) -> PreTrainedTokenizerBase:
    """Load the checkpoint's tokenizer, or the base model's for an adapter that has none.

    Raises:
        OSError: The checkpoint does not exist or has no tokenizer.
    """
    name, revision = model.model_name_or_path, model.model_revision
    adapter = find_adapter_config_file(name, revision=revision)
    if adapter and not has_file(name, "tokenizer_config.json", revision=revision):
        base = json.loads(Path(adapter).read_bytes())
        name, revision = base["base_model_name_or_path"], base.get("revision") or "main"
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        name, revision=revision, trust_remote_code=model.trust_remote_code
    )
    return tokenizer


def load_model(model: ModelArguments, device: torch.device) -> PreTrainedModel:
    """Load the policy in evaluation mode, with its base model if the checkpoint is an adapter."""
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
    """The token ids that end a message, as in training: the end-of-sequence tokens of tokenizer and checkpoint."""
    configured: Any = model.generation_config and model.generation_config.eos_token_id
    ends = configured if isinstance(configured, list) else [configured]
    return sorted({token_id for token_id in (tokenizer.eos_token_id, *ends) if token_id is not None})
