"""Forward passes that skip padding behind the completions and, on a CPU, the logits of prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from sorl_trl.rollout.slots.support import rope_of_batch
from sorl_trl.trainers.critic.model import causal_lm_of

_TEXT_ALONE = {"fused_lm_head"}
"""Arguments besides ids, mask and labels for text alone. Others mean images, or a router loss that counts padding."""
_PER_TOKEN = ("log_probs", "entropy", "critic_values")


class NoPadding:
    """Wraps a model for `GRPOTrainer._get_per_token_logps_and_entropies`, which only calls it, to skip padding.

    TRL pads a rollout to its longest trajectory, and its micro-batches keep that width. Columns behind the longest
    trajectory of the micro-batch change nothing before them, and are 0 in the output. Do not use it if positions
    depend on the width (`width_matters`). `prompt` is the width of prompts, including padding.
    """

    def __init__(self, model: Callable[..., Any], prompt: int) -> None:
        self._model = model
        self._prompt = prompt

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **kwargs: Any) -> Any:
        width = end = input_ids.size(1)
        if kwargs.keys() <= _TEXT_ALONE:
            end = max([self._prompt + 1, *(attention_mask.any(0).nonzero()[-1:, 0] + 1).tolist()])
        cut = {"input_ids": input_ids[:, :end], "attention_mask": attention_mask[:, :end], "labels": labels[:, :end]}
        output = self._model(**cut, **kwargs)
        for name in _PER_TOKEN:
            if (values := getattr(output, name, None)) is not None:
                setattr(output, name, nn.functional.pad(values, (0, width - end)))
        return output


def width_matters(model: Any) -> bool:
    """Whether the model's output for a row depends on the length of other rows in its batch."""
    return rope_of_batch(model.config.get_text_config(decoder=True)) is not None


class CompletionsAlone:
    """Wraps a model so that its head reads only completions: on a CPU, TRL would also compute the logits of prompts.

    `policy` is `model` without accelerate's wrappers.
    """

    def __init__(self, model: Callable[..., Any], policy: Any, prompt: int) -> None:
        self._model = model
        self._backbone = causal_lm_of(policy).base_model
        self._prompt = prompt

    def __call__(self, labels: Tensor, **kwargs: Any) -> Any:
        def cut(_backbone: Any, _args: Any, output: Any) -> Any:
            hook.remove()  # a critic may ask the backbone again
            # Count from the end, because prompt tuning puts virtual tokens in front.
            before_completions = output.last_hidden_state[:, self._prompt - labels.size(1) - 1 : -1]
            return type(output)(**{**output, "last_hidden_state": before_completions})

        hook = self._backbone.register_forward_hook(cut)
        try:
            return self._model(**kwargs, shift_labels=labels[:, self._prompt :])
        finally:
            hook.remove()
