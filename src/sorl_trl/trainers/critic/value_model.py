"""A trained critic on its own, which scores trajectories."""

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
    """A backbone and a value head that compute V(s) after each token of a text. `load_critic` makes it."""

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

        A trajectory that an infrastructure failure ended gets no values, because it is not trained on either.
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
            before_turns = last_token_before_turn(turn_ids)[turn_mask(turn_ids).bool()]  # -1: the prompt's last token
            found.append(of_text[len(trajectory.prompt_ids) + before_turns].tolist())
        return found


def load_critic(path: str | Path, base_model: str | None = None, **kwargs: Any) -> ValueModel:
    """Load the critic that `SOPPOTrainer` saved.

    Args:
        path: A checkpoint of `SOPPOTrainer`, or the `critic/` folder in it. A critic of kind "head" reads the hidden
            states of the policy beside that folder.
        base_model: The id or path of the model under an adapter, if it is not where the adapter's configuration says.
        kwargs: Arguments for the backbone's `from_pretrained`, such as `dtype` or `device_map`.

    Raises:
        ValueError: There is no critic at `path`.
        FileNotFoundError: The critic has no weights, because DeepSpeed kept them in its own shards.
        RuntimeError: The backbone has another hidden size.
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
