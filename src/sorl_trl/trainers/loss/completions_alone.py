"""The head of the policy reads completions alone: on a CPU, TRL's would make logits of prompts too, for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sorl_trl.trainers.critic.model import causal_lm_of


class CompletionsAlone:
    """A model for `GRPOTrainer._get_per_token_logps_and_entropies`, which only calls it.

    Args:
        model: what it would call: a policy with TRL's fused head, under any wrapper.
        policy: the same without accelerate's wrappers.
        length: tokens of a completion, padding included.
    """

    def __init__(self, model: Callable[..., Any], policy: Any, length: int) -> None:
        self._model = model
        self._backbone = causal_lm_of(policy).base_model
        self._length = length

    def __call__(self, labels: Tensor, **kwargs: Any) -> Any:
        def cut(_backbone: Any, _args: Any, output: Any) -> Any:
            hook.remove()  # a critic may ask the backbone again
            before_completions = output.last_hidden_state[:, -self._length - 1 : -1]
            return type(output)(**{**output, "last_hidden_state": before_completions})

        hook = self._backbone.register_forward_hook(cut)
        try:
            return self._model(**kwargs, shift_labels=labels[:, -self._length :])
        finally:
            hook.remove()
