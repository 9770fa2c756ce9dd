"""One pass for policy, old policy, reference and critic: log-probabilities, entropies and values of a batch.

A trajectory is turns in one or several contexts. The model reads each context as a separate text, and only tokens that
the loss keeps are scored. `layouts.py` defines how they are laid out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from sorl_trl.rollout.engines.slots.support import is_bidirectional, rope_of_batch
from sorl_trl.rollout.routing import ROUTES, Replay, replayed_routers
from sorl_trl.trainers.batch import loss_mask_of
from sorl_trl.trainers.checks import warn_on_main_process
from sorl_trl.trainers.critic import (
    CRITIC_ATTRIBUTE,
    BackboneCall,
    CausalLMOutputWithCritic,
    causal_lm_of,
    within_and_recomputed,
)
from sorl_trl.trainers.host import Host
from sorl_trl.trainers.layouts import LAYOUTS, Plan, attend_in_segments, is_flash, plan_of, why_not_packed
from sorl_trl.trainers.prompts import IMAGE_INPUTS

logger = logging.getLogger(__name__)

_LARGEST_WINDOW = 1024
"""The largest sliding window that the texts of the trial exceed, because they take memory."""
_LARGEST_DIFFERENCE = 3.0
"""The largest difference between layouts, over what rounding explains. It is larger if texts attend to each other."""
_NEGLIGIBLE = 5e-5
"""A difference, in nats, that counts as rounding even where none is found."""


@dataclass(frozen=True)
class Pass:
    """What the model computes for a batch. (B, T) tensors are 0 at tokens that are not scored."""

    logps: Tensor
    entropies: Tensor | None = None
    values: Tensor | None = None
    """V of the state before each token."""
    aux_loss: Tensor | None = None
    """() the router loss of a mixture of experts."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """What else to log of the pass: values, and where they count."""


class Forward:
    """The forward pass of a trainer's models.

    `layouts` are those that all models support; if only padded rows are left, `reason` explains why. Construction
    inspects the models' classes and configs and makes them attend in segments; the first pass tries the layouts out.

    Raises:
        ValueError: One process has several GPUs, or a model is bidirectional.
    """

    def __init__(self, host: Host) -> None:
        if host.args.n_gpu > 1:
            raise ValueError(
                f"One process has {host.args.n_gpu} GPUs, but trains on one: start one process per GPU with "
                "`accelerate launch`, or set CUDA_VISIBLE_DEVICES to one of them."
            )
        self._host = host
        policy = causal_lm_of(host.model)
        reference = None if host.reference_model is None else host.accelerator.unwrap_model(host.reference_model)
        critic = getattr(policy, CRITIC_ATTRIBUTE, None)
        backbone = getattr(critic, "backbone", None)
        models = [each for each in (policy, reference, backbone) if each is not None]
        if (found := next(filter(is_bidirectional, models), None)) is not None:
            raise ValueError(
                f"{type(found).__name__} is bidirectional: its tokens attend to those that they predict. Set "
                "`is_decoder` or `is_causal` of its config to True."
            )
        kind = getattr(critic, "kind", None)
        self.routers = replayed_routers(policy, host.args.router_replay, kind, host.checkpoints_activations)
        """The routers that are replayed."""
        self.reason = _why_unfolded(host.model, models)
        self.layouts: Sequence[str] = LAYOUTS[:1]
        self._is_tried = False
        if self.reason is None:
            for model in models:
                attend_in_segments(model)
            # Texts that share a beginning may have other experts in it.
            self.layouts = LAYOUTS[:2] if self.routers or any(map(is_flash, models)) else LAYOUTS

    def __call__(
        self,
        model: Any,
        batch: Mapping[str, Any],
        *,
        entropies: bool = False,
        router: bool = False,
        values: bool = False,
        rows: int | None = None,
        layouts: Sequence[str] | None = None,
    ) -> Pass:
        """Run `model`, wrapped or not, on a batch. All processes call it together.

        Args:
            model: The policy, or the reference model.
            batch: TRL's, with `prompt_ids`, `completion_ids` and their masks, and optionally `tool_mask`, image
                inputs, `routes` to be replayed, and `context_ids` (B, T): a completion token with entry c belongs to
                context |c|, and context 0 continues the prompt.
            entropies, router, values: What to compute besides log-probabilities. Values need a critic.
            rows: The number of rows per forward call; None for all at once.
            layouts: The layouts to choose from; None for those that all models support.

        Raises:
            ValueError: A trajectory with images has several contexts.
        """
        if not self._is_tried:
            self._is_tried = True
            self._try_out()
        layouts = self.layouts if layouts is None else layouts
        host = self._host
        ids, mask = (torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], 1) for name in ("ids", "mask"))
        images = {name: batch[name] for name in IMAGE_INPUTS if name in batch}
        contexts = batch.get("context_ids")
        if images:
            if contexts is not None and contexts.any():
                raise ValueError(
                    "`context_ids` has several contexts, but only the first would have the prompt's images."
                )
            layouts, contexts = ("rows",), None
        policy = host.accelerator.unwrap_model(model) if model is host.reference_model else host.model
        replay = Replay(self.routers, batch[ROUTES]) if self.routers and ROUTES in batch else None
        asked = LaidOut(model, policy, layouts, loss_mask_of(batch), contexts, values, replay)
        options = {"batch_size": rows, "compute_entropy": entropies, "compute_aux_loss": router, **images}
        length = batch["completion_ids"].size(1)
        logps, entropy, aux_loss = host.logps_and_entropies(asked, ids, mask, length, **options)
        critic_values = torch.cat(asked.values)[:, -length:] if values else None
        return Pass(logps, entropy, critic_values, aux_loss, replay.metrics() if replay else {})

    def _try_out(self) -> None:
        """Compare the layouts on short texts, and keep those that agree. All processes decide alike."""
        host = self._host
        if self.reason is None:
            off = torch.tensor(self._difference(), device=host.accelerator.device)
            most = float(host.accelerator.gather(off).max())
            if not most <= _LARGEST_DIFFERENCE:  # true for NaN, too
                self.layouts = LAYOUTS[:1]
                off_by = f"results without padding are off by {most:.2g} times what rounding explains"
                self.reason = "it fails without padding" if most == float("inf") else off_by
        if self.reason is None:
            logger.info("Trajectories are processed without padding.")
            return
        warn_on_main_process(
            host.args,
            f"{type(causal_lm_of(host.model)).__name__} is trained on padded trajectories, because {self.reason}. "
            "Results are correct, but steps take longer.",
        )

    def _difference(self) -> float:
        """The difference of layouts from padded rows, over that of padded rows from themselves; infinite if one fails.

        It is the largest of mean differences in log-probabilities and values, of all tokens and of those past the
        sliding window. Rows that are padded further, in another kernel, show what rounding explains: without the
        kernel, they may not differ at all.
        """
        model, causal_lm = self._host.model, causal_lm_of(self._host.model)
        config = causal_lm.config.get_text_config()
        window = getattr(config, "sliding_window", None) or 0
        window = window if window <= _LARGEST_WINDOW else 0
        batch = _texts(window + 17, config.vocab_size, self._host.accelerator.device)
        is_training, values = model.training, hasattr(causal_lm, CRITIC_ATTRIBUTE)
        model.eval()  # without dropout
        try:
            with torch.no_grad():
                plain, *packed = (self(model, batch, values=values, layouts=[layout]) for layout in self.layouts)
                with sdpa_kernel(SDPBackend.MATH):
                    again = self(model, batch, values=values, layouts=["rows"], rows=1)
        except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
            logger.debug("Contexts in one row fail.", exc_info=True)
            return float("inf")
        finally:
            model.train(is_training)
        kept = batch["completion_mask"].bool()
        past = kept & (torch.arange(kept.size(1), device=kept.device) >= window)
        floor, *found = (
            torch.stack([off[tokens].mean() for off in _off(each, plain) for tokens in (kept, past)])
            for each in (again, *packed)
        )
        return float((torch.stack(found) / (floor + _NEGLIGIBLE)).max())  # NaN if there is one


def _off(ours: Pass, theirs: Pass) -> list[Tensor]:
    """The (B, T) differences in log-probabilities and, if computed, in values."""
    pairs = (ours.logps, theirs.logps), (ours.values, theirs.values)
    return [(one - other).abs() for one, other in pairs if one is not None and other is not None]


def _why_unfolded(model: Any, models: Sequence[PreTrainedModel]) -> str | None:
    config = getattr(model, "active_peft_config", None)
    if config is not None and config.is_prompt_learning:
        return f"its adapter ({type(config).__name__}) puts virtual tokens in front of each row"
    return next(filter(None, map(why_not_packed, models)), None)


def _texts(length: int, words: int, device: torch.device) -> dict[str, Tensor]:
    """Three rows with `length` tokens or more, padded further than they need; two share a prefix."""
    one, two, three = (torch.arange(3 * length, device=device) * 37 + 11).view(3, -1) % words
    texts = one, torch.cat([one[:7], two]), three
    ids, mask = (pad_sequence([*rows], batch_first=True) for rows in (texts, map(torch.ones_like, texts)))
    whole = {"ids": pad(ids, (0, 9)), "mask": pad(mask, (0, 9))}
    parts = {"prompt": slice(4), "completion": slice(4, None)}
    return {f"{part}_{name}": each[:, own] for name, each in whole.items() for part, own in parts.items()}


@dataclass
class LaidOut:
    """Stands in for a model in `GRPOTrainer._get_per_token_logps_and_entropies`, which calls it with some rows."""

    model: Any
    """What to call."""
    policy: Any
    """`model` without the wrappers of engines."""
    layouts: Sequence[str]
    """The one with the fewest tokens is taken; simpler ones are preferred (`WORTH`)."""
    scored: Tensor
    """(B, T) 1 at the tokens to score, of all rows."""
    contexts: Tensor | None = None
    """(B, T) `context_ids` of all rows."""
    with_values: bool = False
    """Whether to collect the critic's `values`."""
    replay: Replay | None = None
    """What the policy's routers follow."""
    values: list[Tensor] = field(default_factory=list)
    """(rows, W) for each call."""
    row: int = 0
    """The first row of the next call."""

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **options: Any) -> Any:
        rows = slice(self.row, self.row + len(input_ids))
        self.row = rows.stop
        before = input_ids.size(1) - self.scored.size(1)
        scored = pad(self.scored[rows].bool(), (before, 0), value=False)
        contexts = None if self.contexts is None else pad(self.contexts[rows].abs(), (before, 0))
        layouts, causal_lm = self.layouts, causal_lm_of(self.policy)
        config = causal_lm.config.get_text_config(decoder=True)
        if getattr(config, "output_router_logits", False):
            options = {"output_router_logits": False, **options}
        if is_masked := options.get("output_router_logits", False):
            layouts = layouts[:1]  # a router loss counts the tokens that a mask marks, which only padded rows have
        width = input_ids.size(1) if rope_of_batch(config) is not None else 0
        plan = plan_of(input_ids, attention_mask, scored, contexts, layouts, width)
        if plan.segments is not None:
            options |= {"position_ids": plan.position_ids, **plan.segments.arguments(causal_lm)}
        elif is_masked or layouts[0] == "rows":
            options |= {"attention_mask": plan.attention_mask}
        recomputed = partial(within_and_recomputed, causal_lm.modules())
        replay = self.replay and self.replay.around(rows, attention_mask, plan.sources, recomputed)
        with replay or nullcontext():
            output = self._run(plan, options)
        for name in ("log_probs", "entropy"):
            if (found := getattr(output, name, None)) is not None:
                setattr(output, name, plan.scatter(found, input_ids))
        if self.with_values:
            self.values.append(plan.scatter(output.critic_values, input_ids))
        return output

    def _run(self, plan: Plan, options: dict[str, Any]) -> Any:
        """The model's output, (1, M) at the positions that predict scored tokens.

        Critic and head run within the wrapped model's forward, as engines expect.
        """
        causal_lm = causal_lm_of(self.policy)
        values: list[Tensor] = []

        def on_backbone(backbone: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            backbone_hook.remove()  # a critic may ask the backbone again
            if self.with_values:
                critic = getattr(causal_lm, CRITIC_ATTRIBUTE)
                critic.unfreeze()
                values.append(plan.predicting(critic(BackboneCall(backbone, args, kwargs, output))))
            return type(output)(**{**output, "last_hidden_state": plan.predicting(output.last_hidden_state)})

        def on_policy(_policy: nn.Module, _args: Any, output: Any) -> Any:
            return CausalLMOutputWithCritic(**output, critic_values=values.pop()) if values else output

        # The backbone is looked up on each call, since FSDP and PEFT replace it.
        backbone_hook = causal_lm.base_model.register_forward_hook(on_backbone, with_kwargs=True)
        policy_hook = self.policy.register_forward_hook(on_policy, prepend=True)
        try:
            return self.model(input_ids=plan.input_ids, shift_labels=plan.labels, **options)
        finally:
            backbone_hook.remove()
            policy_hook.remove()
