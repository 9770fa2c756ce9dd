"""Writes, checks and reads the `critic/` folder beside a policy's checkpoint.

checkpoint-100/            the policy, a plain Hugging Face or PEFT checkpoint
checkpoint-100/critic/
    critic_config.json     its kind, and what its head reads
    value_head.safetensors
    adapter/               of kind "adapter": a PEFT checkpoint
    backbone/              of kind "model": a Hugging Face checkpoint
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sorl_trl.trainers.critic.adapter import CRITIC_ADAPTER, AdapterCritic, known_adapter
from sorl_trl.trainers.critic.model import CRITIC_ATTRIBUTE, Critic, ModelCritic

CRITIC_FOLDER = "critic"
CONFIG_FILE = "critic_config.json"
HEAD_FILE = "value_head.safetensors"
ADAPTER_FOLDER = "adapter"
ADAPTER_FILE = "adapter_model.safetensors"
BACKBONE_FOLDER = "backbone"
HEAD_READS = "directions of hidden states"
"""What tells a head from those of sorl-trl 0.2 and before, which read the hidden states themselves."""

_CRITIC_PREFIX = re.compile(rf"^(?:base_model\.(?:model\.)?)?{CRITIC_ATTRIBUTE}\.")  # prompt tuning has no `model`


def save_critic(critic: Critic, model: nn.Module, folder: Path, state_dict: Mapping[str, Tensor]) -> None:
    """Write the critic into `folder`, which is created if missing.

    `state_dict` is that of `model`, unwrapped and gathered from its shards. If an engine keeps the weights in its own
    checkpoint, it is empty, and only the configuration is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps({"kind": critic.kind, "head_reads": HEAD_READS}) + "\n")
    if isinstance(critic, AdapterCritic):
        critic.config.save_pretrained(str(folder / ADAPTER_FOLDER))
    if not state_dict:
        return
    own = {_CRITIC_PREFIX.sub("", name): tensor for name, tensor in state_dict.items() if _CRITIC_PREFIX.match(name)}
    head = {name.removeprefix("head."): t.contiguous() for name, t in own.items() if name.startswith("head.")}
    save_file(head, folder / HEAD_FILE)
    if isinstance(critic, ModelCritic):
        backbone = {name.removeprefix("backbone."): t for name, t in own.items() if name.startswith("backbone.")}
        critic.backbone.save_pretrained(folder / BACKBONE_FOLDER, state_dict=backbone)
    elif isinstance(critic, AdapterCritic):
        with known_adapter(cast(PeftModel, model), critic.config):
            adapter = get_peft_model_state_dict(
                model, state_dict=dict(state_dict), adapter_name=CRITIC_ADAPTER, save_embedding_layers=False
            )
        save_file({name: t.contiguous() for name, t in adapter.items()}, folder / ADAPTER_FOLDER / ADAPTER_FILE)


def critic_folder(path: str | Path) -> Path:
    """`path` itself if it holds a critic, else the `critic/` folder in it, whether or not that exists."""
    path = Path(path)
    return path if (path / CONFIG_FILE).is_file() else path / CRITIC_FOLDER


def kind_of(folder: Path) -> str:
    """The kind of the critic in `folder`.

    Raises:
        ValueError: There is no critic, or its head computes values in another way.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(
            f"There is no critic in {folder}: a checkpoint of `SOPPOTrainer` holds `{CRITIC_FOLDER}/{CONFIG_FILE}`. "
            "Name such a checkpoint; a new run without one makes a new critic."
        )
    config = json.loads(path.read_text())
    if config.get("head_reads") != HEAD_READS:
        raise ValueError(
            f"The critic in {folder} is of an earlier sorl-trl, whose heads read hidden states of any length: its "
            "values would be wrong. Train a new critic; the policy beside it can start the run."
        )
    kind: str = config["kind"]
    return kind


def check_critic_folder(critic: Critic, folder: Path) -> None:
    """Raise ValueError unless `folder` holds a critic of the kind of `critic`."""
    kind = kind_of(folder)
    if kind != critic.kind:
        raise ValueError(
            f"The critic in {folder} is of kind {kind!r}, this run's of kind {critic.kind!r}: set `critic={kind!r}`."
        )


def restore_critic(critic: Critic, model: nn.Module, folder: Path) -> None:
    """Load the weights in `folder` into `critic`.

    Raises:
        ValueError: `folder` holds no critic, or one of another kind.
        RuntimeError: The critic in `folder` has another size.
    """
    check_critic_folder(critic, folder)
    if isinstance(critic, ModelCritic):
        # Under ZeRO-3, `from_pretrained` has already filled the shards of both, and this copies nothing.
        saved = type(critic.backbone).from_pretrained(folder / BACKBONE_FOLDER, dtype=critic.backbone.dtype)
        critic.backbone.load_state_dict(saved.state_dict())
    elif isinstance(critic, AdapterCritic):
        adapter = load_file(folder / ADAPTER_FOLDER / ADAPTER_FILE)
        with known_adapter(cast(PeftModel, model), critic.config):
            set_peft_model_state_dict(model, adapter, adapter_name=CRITIC_ADAPTER)
        critic.unfreeze()
    critic.head.load_state_dict(load_file(folder / HEAD_FILE))
