"""The `critic/` folder beside a policy's checkpoint: written, checked and read back.

checkpoint-100/            the policy, a plain Hugging Face or PEFT checkpoint
checkpoint-100/critic/
    critic_config.json     kind and hidden size
    value_head.safetensors
    adapter/               of kind "adapter": a PEFT checkpoint
    backbone/              of kind "model": a Hugging Face checkpoint
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sorl_trl.command_line import UserMistake
from sorl_trl.trainers.critic.adapter import CRITIC_ADAPTER, AdapterCritic
from sorl_trl.trainers.critic.model import CRITIC_ATTRIBUTE, Critic, ModelCritic

CRITIC_FOLDER = "critic"
CONFIG_FILE = "critic_config.json"
HEAD_FILE = "value_head.safetensors"
ADAPTER_FOLDER = "adapter"
BACKBONE_FOLDER = "backbone"
ADAPTER_SHAPE = ("r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora")
"""Fields of a LoRA configuration that say which weights there are, and what they mean."""

_CRITIC_PREFIX = re.compile(rf"^(?:base_model\.model\.)?{CRITIC_ATTRIBUTE}\.")


def save_critic(critic: Critic, model: nn.Module, folder: Path, state_dict: Mapping[str, Tensor] | None) -> None:
    """Write `folder`.

    Args:
        critic: attached to `model`.
        model: the trained model, unwrapped.
        folder: where to, made if missing.
        state_dict: of `model`, gathered from its shards; None where `model` itself is whole. Empty where an engine
            keeps the weights in a checkpoint of its own: then only the configuration is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {"kind": critic.kind, "hidden_size": critic.head.hidden_size}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    if isinstance(critic, AdapterCritic):
        critic.config.save_pretrained(str(folder / ADAPTER_FOLDER))
    state = model.state_dict() if state_dict is None else state_dict
    if not state:
        return
    own = {_CRITIC_PREFIX.sub("", name): tensor for name, tensor in state.items() if _CRITIC_PREFIX.match(name)}
    head = {name.removeprefix("head."): t.contiguous() for name, t in own.items() if name.startswith("head.")}
    save_file(head, folder / HEAD_FILE)
    if isinstance(critic, ModelCritic):
        backbone = {name.removeprefix("backbone."): t for name, t in own.items() if name.startswith("backbone.")}
        critic.backbone.save_pretrained(folder / BACKBONE_FOLDER, state_dict=backbone)
    elif isinstance(critic, AdapterCritic):
        _save_adapter(model, folder / ADAPTER_FOLDER, dict(state))


def _save_adapter(model: Any, folder: Path, state_dict: dict[str, Tensor]) -> None:
    """What `PeftModel.save_pretrained` writes, for this adapter alone and not in a folder named after it."""
    adapter = get_peft_model_state_dict(
        model, state_dict=state_dict, adapter_name=CRITIC_ADAPTER, save_embedding_layers=False
    )
    save_file({name: t.contiguous() for name, t in adapter.items()}, folder / "adapter_model.safetensors")


def critic_folder(path: str | Path) -> Path:
    """`path` itself if it holds a critic, else the `critic/` folder in it, whether or not there is one."""
    path = Path(path)
    return path if (path / CONFIG_FILE).is_file() else path / CRITIC_FOLDER


def read_critic_config(folder: Path) -> dict[str, Any]:
    """The `critic_config.json` in `folder`.

    Raises:
        ValueError: there is none.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UserMistake(
            f"There is no critic in {folder}: a checkpoint of `SOPPOTrainer` holds `{CRITIC_FOLDER}/{CONFIG_FILE}`. "
            "Name such a checkpoint; without one, a new run makes a new critic."
        )
    config: dict[str, Any] = json.loads(path.read_text())
    return config


def check_critic_folder(critic: Critic, folder: Path) -> None:
    """Raise ValueError unless `folder` holds a critic that fits `critic`."""
    config = read_critic_config(folder)
    if config["kind"] != critic.kind:
        raise UserMistake(
            f"The critic in {folder} is of kind {config['kind']!r}, this run's of kind {critic.kind!r}: set "
            f"`critic={config['kind']!r}`."
        )
    hidden_size = critic.head.hidden_size
    if config["hidden_size"] != hidden_size:
        raise UserMistake(
            f"The critic in {folder} reads hidden states of size {config['hidden_size']}, but this run's model has "
            f"size {hidden_size}. It belongs to another model."
        )
    if isinstance(critic, AdapterCritic):
        _check_adapter(critic.config, folder / ADAPTER_FOLDER)


def _check_adapter(config: LoraConfig, folder: Path) -> None:
    """Raise ValueError unless the LoRA adapter in `folder` has the shape and scale of `config`."""
    saved = LoraConfig.from_pretrained(str(folder))
    for name in ADAPTER_SHAPE:
        theirs, ours = getattr(saved, name), getattr(config, name)
        if theirs != ours:
            raise UserMistake(
                f"The critic's adapter in {folder} has `{name}` {theirs!r}, this run's LoRA configuration {ours!r}: "
                "they must be the same."
            )


def restore_critic(critic: Critic, model: nn.Module, folder: Path) -> None:
    """Load the weights in `folder` into `critic`.

    Raises:
        ValueError: `folder` holds no critic, or one of another kind or size.
    """
    check_critic_folder(critic, folder)
    if isinstance(critic, ModelCritic):
        # Under ZeRO-3 both are shards that `from_pretrained` has filled, and this copies nothing.
        saved = type(critic.backbone).from_pretrained(folder / BACKBONE_FOLDER, dtype=critic.backbone.dtype)
        critic.backbone.load_state_dict(saved.state_dict())
    elif isinstance(critic, AdapterCritic):
        adapter = load_file(folder / ADAPTER_FOLDER / "adapter_model.safetensors")
        set_peft_model_state_dict(model, adapter, adapter_name=CRITIC_ADAPTER)
    critic.head.load_state_dict(load_file(folder / HEAD_FILE))
