"""Makes a policy's critic, saves and restores it in the `critic/` folder beside the policy, and loads it separately.

checkpoint-100/            the policy, a plain Hugging Face or PEFT checkpoint
checkpoint-100/critic/
    critic_config.json     its kind, and what its head reads
    value_head.safetensors
    adapter/               of kind "adapter": a PEFT checkpoint
    backbone/              of kind "model": a Hugging Face checkpoint
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM

from sorl_trl.rollout.engines.slots.support import IN_SEGMENTS
from sorl_trl.trainers.config import SOPPOConfig
from sorl_trl.trainers.critic import (
    CRITIC_ATTRIBUTE,
    AdapterCritic,
    Critic,
    HeadCritic,
    ModelCritic,
    ValueHead,
    add_critic_adapter,
    causal_lm_of,
    known_adapter,
    trained_dtype,
)
from sorl_trl.types import Trajectory

CRITIC_FOLDER = "critic"
CONFIG_FILE = "critic_config.json"
HEAD_FILE = "value_head.safetensors"
ADAPTER_FOLDER = "adapter"
ADAPTER_FILE = "adapter_model.safetensors"
BACKBONE_FOLDER = "backbone"
HEAD_READS = "directions of hidden states"
"""Distinguishes a head from those of sorl-trl 0.2 and earlier, which read the hidden states themselves."""


def critic_folder(path: str | Path) -> Path | None:
    """The critic folder at `path`, which is that folder or the checkpoint that contains it; None if there is none."""
    folders = Path(path), Path(path) / CRITIC_FOLDER
    return next((folder for folder in folders if (folder / CONFIG_FILE).is_file()), None)


def find_critic(path: str | Path, kind: str | None = None) -> tuple[Path, str]:
    """The folder of the critic at `path`, and its kind.

    Raises:
        ValueError: There is no critic, its head is in an old format, or it is not of `kind`.
    """
    folder = critic_folder(path)
    if folder is None:
        raise ValueError(
            f"There is no critic in {path}: `{CRITIC_FOLDER}/{CONFIG_FILE}` is missing. Name a checkpoint of "
            "`SOPPOTrainer`, or none, so that a new run makes a new critic."
        )
    config = json.loads((folder / CONFIG_FILE).read_text())
    if config.get("head_reads") != HEAD_READS:
        raise ValueError(
            f"The critic in {folder} is from an earlier sorl-trl, with a head that does not normalize hidden states: "
            "its values would be wrong. Train a new critic; the policy beside it can start the run."
        )
    saved = str(config["kind"])
    if kind not in (None, saved):
        raise ValueError(
            f"The critic in {folder} is of kind {saved!r}, but this run's is of kind {kind!r}: set `critic={saved!r}`."
        )
    return folder, saved


def setup_critic(model: Any, config: SOPPOConfig, vocabulary: int) -> Critic:
    """Give the policy `model` a critic, new or as `critic_model_name_or_path` names it.

    It is the same on every rank, regardless of random state. `vocabulary` is the number of tokens in the tokenizer.

    Raises:
        ValueError: The configuration does not fit `model`.
    """
    kind, policy, path = _kind_for(model, config), causal_lm_of(model), config.critic_model_name_or_path
    saved = None if path is None else critic_folder(path)
    if saved is not None:
        find_critic(saved, kind)
    elif path is not None and kind != "model":
        raise ValueError(
            f"`critic_model_name_or_path` is {path!r}, which has no critic. `critic={kind!r}` can only start from a "
            "run or checkpoint of `SOPPOTrainer`; other models need `critic='model'`."
        )
    dtype, source = trained_dtype(model), path if saved is None else saved / BACKBONE_FOLDER
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        backbone = _backbone(policy, config, vocabulary, dtype, source) if kind == "model" else policy
        head = ValueHead(backbone.config.get_text_config().hidden_size, dtype)
        if kind == "model":
            critic: Critic = ModelCritic(head, backbone)
        elif kind == "adapter":
            critic = AdapterCritic(head, model, add_critic_adapter(model))
        else:
            critic = HeadCritic(head)
    policy.add_module(CRITIC_ATTRIBUTE, critic.to(model.device))
    if saved is not None:
        restore_critic(critic, model, saved)
    return critic


def _kind_for(model: Any, config: SOPPOConfig) -> str:
    """The kind of critic that the policy gets. Raises ValueError if it cannot have it."""
    has_peft = isinstance(model, PeftModel)
    kind = config.critic or ("adapter" if has_peft else "head")
    if hasattr(causal_lm_of(model), CRITIC_ATTRIBUTE):
        raise ValueError("The policy already has a critic from an earlier trainer: load the policy again.")
    if kind == "head" and config.critic_learning_rate is not None:
        raise ValueError(
            f"`critic_learning_rate` is {config.critic_learning_rate}, but `critic='head'` has only a head: set "
            "`value_head_learning_rate` instead, in units of the return."
        )
    if kind == "adapter" and not has_peft:
        raise ValueError("`critic='adapter'` needs a PEFT model: pass a `peft_config`, or use 'head' or 'model'.")
    return kind


def _backbone(policy: Any, config: SOPPOConfig, vocabulary: int, dtype: torch.dtype, source: str | Path | None) -> Any:
    if policy.config.get_text_config() is not policy.config:
        raise ValueError(
            f"`critic='model'` reads only text, but the policy is a {type(policy).__name__}. Use `critic='head'`, or "
            "`critic='adapter'` with LoRA."
        )
    own = policy.config._name_or_path
    source = source or own
    if not source:
        raise ValueError(
            "`critic='model'` starts from the policy's own checkpoint, but the policy was not loaded from one. Set "
            "`critic_model_name_or_path`."
        )
    attention = policy.config._attn_implementation
    options = {"attn_implementation": "sdpa" if attention == IN_SEGMENTS else attention, "dtype": dtype}
    if source == own and config.model_init_kwargs:
        options["revision"] = config.model_init_kwargs.get("revision")
    backbone = AutoModel.from_pretrained(source, trust_remote_code=config.trust_remote_code, **options)
    size = backbone.config.get_text_config().vocab_size
    if size < vocabulary:
        raise ValueError(
            f"The critic's model {str(source)!r} has a vocabulary of {size}, but the tokenizer knows {vocabulary} "
            "tokens. Set `critic_model_name_or_path` to a model of the policy's family."
        )
    return backbone


def save_critic(critic: Critic, model: nn.Module, folder: Path, state_dict: Mapping[str, Tensor]) -> None:
    """Write the critic into `folder`, which is created if missing.

    `state_dict` is that of `model`, unwrapped and gathered from its shards. It is empty if an engine keeps the weights
    in its own checkpoint; then only the configuration is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps({"kind": critic.kind, "head_reads": HEAD_READS}) + "\n")
    if isinstance(critic, AdapterCritic):
        critic.config.save_pretrained(str(folder / ADAPTER_FOLDER))
    if not state_dict:
        return

    def weights_of(part: str) -> dict[str, Tensor]:
        prefix = f"{CRITIC_ATTRIBUTE}.{part}."
        return {name.partition(prefix)[2]: t.contiguous() for name, t in state_dict.items() if prefix in name}

    save_file(weights_of("head"), folder / HEAD_FILE)
    if isinstance(critic, ModelCritic):
        critic.backbone.save_pretrained(folder / BACKBONE_FOLDER, state_dict=weights_of("backbone"))
    elif isinstance(critic, AdapterCritic):
        with known_adapter(cast(PeftModel, model), critic.config):
            adapter = get_peft_model_state_dict(
                model, state_dict=dict(state_dict), adapter_name=CRITIC_ATTRIBUTE, save_embedding_layers=False
            )
        save_file({name: t.contiguous() for name, t in adapter.items()}, folder / ADAPTER_FOLDER / ADAPTER_FILE)


def restore_critic(critic: Critic, model: nn.Module, path: str | Path) -> None:
    """Load the weights of the critic at `path` into `critic`.

    Raises:
        ValueError: There is no critic, or one of another kind.
        RuntimeError: The saved critic has another size.
    """
    folder, _ = find_critic(path, critic.kind)
    if isinstance(critic, ModelCritic):
        # Under ZeRO-3, `from_pretrained` has already filled the shards of both, and this copies nothing.
        saved = type(critic.backbone).from_pretrained(folder / BACKBONE_FOLDER, dtype=critic.backbone.dtype)
        critic.backbone.load_state_dict(saved.state_dict())
    elif isinstance(critic, AdapterCritic):
        adapter = load_file(folder / ADAPTER_FOLDER / ADAPTER_FILE)
        with known_adapter(cast(PeftModel, model), critic.config):
            set_peft_model_state_dict(model, adapter, adapter_name=CRITIC_ATTRIBUTE)
        critic.unfreeze()
    critic.head.load_state_dict(load_file(folder / HEAD_FILE))


class ValueModel(nn.Module):
    """A backbone and a value head that compute V(s) after each token of a text. Made by `load_critic`."""

    def __init__(self, backbone: nn.Module, head: ValueHead) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Compute (B, L) values from (B, L) token ids: V of the state after each token."""
        output = self.backbone(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        values: Tensor = self.head(output.last_hidden_state)
        return values

    @torch.no_grad()
    def turn_values(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """V(s_k), the value of the state in which each turn starts, for each trajectory's turns.

        A trajectory ended by an infrastructure failure gets no values, because it is not trained on.
        """
        device = self.head.weight.device
        read = [[each.read_before(start) for start, _ in each.spans] for each in trajectories]
        return [[self(torch.tensor([text], device=device))[0, -1].item() for text in row] for row in read]


def load_critic(path: str | Path, base_model: str | None = None, **kwargs: Any) -> ValueModel:
    """Load the critic that `SOPPOTrainer` saved.

    Args:
        path: A checkpoint of `SOPPOTrainer`, or the `critic/` folder in it. A critic of kind "head" reads the hidden
            states of the policy beside that folder.
        base_model: The id or path of the model under an adapter, if the adapter's configuration does not point to it.
        kwargs: Arguments for the backbone's `from_pretrained`, such as `dtype` or `device_map`.

    Raises:
        ValueError: There is no critic at `path`.
        FileNotFoundError: The critic has no weights, because DeepSpeed kept them in its own shards.
        RuntimeError: The backbone has another hidden size.
    """
    folder, kind = find_critic(path)
    adapter = folder / ADAPTER_FOLDER if kind == "adapter" else folder.parent
    if kind == "model":
        backbone: Any = AutoModel.from_pretrained(folder / BACKBONE_FOLDER, **kwargs)
    elif not (adapter / "adapter_config.json").is_file():  # a head on a fully fine-tuned policy
        backbone = AutoModelForCausalLM.from_pretrained(adapter, **kwargs).base_model
    else:
        base = base_model or PeftConfig.from_pretrained(str(adapter)).base_model_name_or_path
        if not base:
            raise ValueError(f"`base_model` is None, and {adapter} does not name the model it adapts: give its path.")
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, **kwargs), adapter)
        backbone = model.get_base_model().base_model
    head = ValueHead(backbone.config.get_text_config().hidden_size)
    head.load_state_dict(load_file(folder / HEAD_FILE))
    return ValueModel(backbone, head.to(backbone.device)).eval()
