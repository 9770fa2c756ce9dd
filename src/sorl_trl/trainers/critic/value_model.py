"""A trained critic on its own, to score trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, AutoModelForCausalLM

from sorl_trl.ops import last_token_before_turn, turn_mask
from sorl_trl.rollout import assemble
from sorl_trl.trainers.critic.checkpoint import (
    ADAPTER_FOLDER,
    BACKBONE_FOLDER,
    HEAD_FILE,
    critic_folder,
    kind_of,
)
from sorl_trl.trainers.critic.model import ValueHead
from sorl_trl.types import Trajectory


class ValueModel(nn.Module):
    """V(s) after each token of a text: a backbone and a value head. Made by `load_critic`."""

    def __init__(self, backbone: nn.Module, head: ValueHead) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(B, L) token ids to (B, L) values, V of the state after each token."""
        output = self.backbone(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        values: Tensor = self.head(output.last_hidden_state)
        return values

    @torch.no_grad()
    def turn_values(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """V(s_k), the value of the state in which each turn starts, for each trajectory's turns.

        One that an infrastructure failure ended has none: it is not trained on either.
        """
        if not trajectories:
            return []
        rows = assemble(trajectories)
        texts = [torch.tensor([*t.prompt_ids, *row.completion_ids]) for t, row in zip(trajectories, rows, strict=True)]
        input_ids = pad_sequence(texts, batch_first=True)
        attention_mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
        device = self.head.weight.device
        values = self(input_ids.to(device), attention_mask.to(device)).cpu()
        found = []
        for trajectory, row, of_text in zip(trajectories, rows, values, strict=True):
            turn_ids = torch.tensor([row.turn_ids])
            before_turns = last_token_before_turn(turn_ids)[turn_mask(turn_ids).bool()]  # -1 is the prompt's last one
            found.append(of_text[len(trajectory.prompt_ids) + before_turns].tolist())
        return found


def load_critic(path: str | Path, base_model: str | None = None, **kwargs: Any) -> ValueModel:
    """Load the critic that `SOPPOTrainer` saved.

    Args:
        path: a checkpoint of `SOPPOTrainer`, or the `critic/` folder in it. A critic of kind "head" reads the hidden
            states of the policy beside its folder.
        base_model: id or path of the model under an adapter, where it is not where the adapter's configuration says.
        kwargs: for `from_pretrained` of the backbone, such as `dtype` or `device_map`.

    Raises:
        ValueError: there is no critic at `path`.
        FileNotFoundError: it has no weights, because DeepSpeed kept them in shards of its own.
        RuntimeError: its backbone has another hidden size.
    """
    folder = critic_folder(path)
    backbone = _load_backbone(kind_of(folder), folder, base_model, kwargs)
    head = ValueHead(backbone.config.get_text_config().hidden_size)
    head.load_state_dict(load_file(folder / HEAD_FILE))
    return ValueModel(backbone, head.to(backbone.device)).eval()


def _load_backbone(kind: str, folder: Path, base_model: str | None, kwargs: dict[str, Any]) -> Any:
    if kind == "model":
        return AutoModel.from_pretrained(folder / BACKBONE_FOLDER, **kwargs)
    adapter = folder / ADAPTER_FOLDER if kind == "adapter" else folder.parent
    if not (adapter / "adapter_config.json").is_file():  # a head on a fully fine-tuned policy
        return AutoModelForCausalLM.from_pretrained(adapter, **kwargs).base_model
    base = base_model or PeftConfig.from_pretrained(str(adapter)).base_model_name_or_path
    if not base:
        raise ValueError(f"`base_model` is None, and {adapter} does not name the model it adapts: give its path.")
    return (
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, **kwargs), adapter)
        .get_base_model()
        .base_model
    )
