"""One pass for policy, old policy, reference and critic: log-probabilities, entropies and values of a batch.

A trajectory is turns in one or several contexts. The model reads each context as a separate text, and only tokens that
the loss keeps are scored. `layouts.py` defines how they are laid out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from sorl_trl.rollout.slots.support import rope_of_batch
from sorl_trl.trainers.batch import loss_mask_of
from sorl_trl.trainers.checks import warn_on_main_process
from sorl_trl.trainers.critic import CRITIC_ATTRIBUTE, BackboneCall, CausalLMOutputWithCritic, causal_lm_of
from sorl_trl.trainers.layouts import LAYOUTS, Plan, attend_in_segments, is_flash, plan_of, why_not_packed
from sorl_trl.trainers.prompts import IMAGE_INPUTS
from sorl_trl.trainers.router_replay import ROUTES, Routing, replayed_routers

logger = logging.getLogger(__name__)

_LARGEST_WINDOW = 1024
"""The largest sliding window that is tried out, because texts that exceed it take memory."""


@dataclass(frozen=True)
class Pass:
    """What the model computes for a batch. (B, T) tensors are 0 at tokens that are not scored."""

    logps: Tensor
    entropies: Tensor | None = None
    values: Tensor | None = None
    """V of the state before each token."""
    aux_loss: Tensor | None = None
    """() the router loss of a mixture of experts."""
    routing: Routing | None = None
    """What the routers of a mixture would have chosen themselves, if the pass replayed routes."""


class Forward:
    """The forward pass of a trainer's models.

    `layouts` are those that all models support; if only padded rows are left, `reason` explains why. Construction
    inspects the models' classes and configs and makes them attend in segments; the first pass tries the layouts out.

    Raises:
        ValueError: One process has several GPUs.
    """

    def __init__(self, trainer: Any) -> None:
        if trainer.args.n_gpu > 1:
            raise ValueError(
                f"One process has {trainer.args.n_gpu} GPUs, but trains on one: start one process per GPU with "
                "`accelerate launch`, or set CUDA_VISIBLE_DEVICES to one of them."
            )
        self._trainer = trainer
        policy = causal_lm_of(trainer.model)
        reference = trainer.accelerator.unwrap_model(trainer.ref_model) if trainer.ref_model is not None else None
        backbone = getattr(getattr(policy, CRITIC_ATTRIBUTE, None), "backbone", None)
        models = [each for each in (policy, reference, backbone) if each is not None]
        self.routers = replayed_routers(trainer, policy)
        """The routers that are replayed."""
        self.reason = _why_unfolded(trainer, models)
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
        replay: bool = False,
    ) -> Pass:
        """Run `model`, wrapped or not, on a batch. All processes call it together.

        Args:
            model: The policy, or the reference model.
            batch: TRL's, with `prompt_ids`, `completion_ids` and their masks, and optionally `tool_mask`, image
                inputs, and `context_ids` (B, T): a completion token with entry c belongs to context |c|, and context 0
                continues the prompt.
            entropies, router, values: What to compute besides log-probabilities. Values need a critic.
            rows: The number of rows per forward call; None for all at once.
            layouts: The layouts to choose from; None for those that all models support.
            replay: Whether, with `router_replay`, the policy's routers follow the batch's routes, if it has any.

        Raises:
            ValueError: A trajectory with images has several contexts.
        """
        if not self._is_tried:
            self._is_tried = True
            self._try_out()
        layouts = self.layouts if layouts is None else layouts
        trainer = self._trainer
        ids, mask = (torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], 1) for name in ("ids", "mask"))
        images = {name: batch[name] for name in IMAGE_INPUTS if name in batch}
        contexts = batch.get("context_ids")
        if images:
            if contexts is not None and contexts.any():
                raise ValueError(
                    "`context_ids` has several contexts, but only the first would have the prompt's images."
                )
            layouts, contexts = ("rows",), None
        policy = trainer.accelerator.unwrap_model(model) if model is trainer.ref_model else trainer.model
        asked = LaidOut(model, policy, layouts, loss_mask_of(batch), contexts, values)
        if replay and self.routers is not None:
            asked.routing = Routing(self.routers, batch.get(ROUTES))
        options = {"batch_size": rows, "compute_entropy": entropies, "compute_aux_loss": router, **images}
        length = batch["completion_ids"].size(1)
        logps, entropy, aux_loss = trainer._get_per_token_logps_and_entropies(asked, ids, mask, length, **options)
        critic_values = torch.cat(asked.values)[:, -length:] if values else None
        return Pass(logps, entropy, critic_values, aux_loss, asked.routing)

    def _try_out(self) -> None:
        """Compare the layouts on short texts, and keep those that agree. All processes decide alike."""
        trainer = self._trainer
        if self.reason is None:
            off = torch.tensor(self._difference(), device=trainer.accelerator.device)
            most = float(trainer.accelerator.gather(off).max())
            if not most <= self._tolerance:  # true for NaN, too
                self.layouts = LAYOUTS[:1]
                off_by = f"log-probabilities without padding are off by {most:.2g} on average"
                self.reason = "it fails without padding" if most == float("inf") else off_by
        if self.reason is None:
            logger.info("Trajectories are processed without padding.")
            return
        warn_on_main_process(
            trainer.args,
            f"{type(causal_lm_of(trainer.model)).__name__} is trained on padded trajectories, because {self.reason}. "
            "Results are correct, but steps take longer.",
        )

    @property
    def _tolerance(self) -> float:
        """The largest mean difference, in nats, that rounding explains. It is larger if texts attend to each other."""
        args, dtype = self._trainer.args, self._trainer.model.dtype
        return 0.2 if args.bf16 or args.fp16 or args.tf32 or dtype in (torch.float16, torch.bfloat16) else 1e-4

    def _difference(self) -> float:
        """The mean difference between a layout and unfolded texts that share a prefix; infinite if it fails."""
        model, causal_lm = self._trainer.model, causal_lm_of(self._trainer.model)
        config = causal_lm.config.get_text_config()
        window = getattr(config, "sliding_window", None) or 0
        batch = _texts(
            8 + (window if window <= _LARGEST_WINDOW else 0), config.vocab_size, self._trainer.accelerator.device
        )
        is_training, values = model.training, hasattr(causal_lm, CRITIC_ATTRIBUTE)
        model.eval()  # without dropout
        try:
            with torch.no_grad():
                plain, *others = (self(model, batch, values=values, layouts=[layout]) for layout in self.layouts)
        except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
            logger.debug("Contexts in one row fail.", exc_info=True)
            return float("inf")
        finally:
            model.train(is_training)
        pairs = [pair for each in others for pair in ((each.logps, plain.logps), (each.values, plain.values))]
        known = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
        return max(float((ours - theirs).abs().mean()) for ours, theirs in known)


def _why_unfolded(trainer: Any, models: Sequence[PreTrainedModel]) -> str | None:
    config = getattr(trainer.model, "active_peft_config", None)
    if config is not None and config.is_prompt_learning:
        return f"its adapter ({type(config).__name__}) puts virtual tokens in front of each row"
    return next(filter(None, map(why_not_packed, models)), None)


def _texts(length: int, words: int, device: torch.device) -> dict[str, Tensor]:
    """A row of three contexts with `length` tokens or more; two share a prefix."""
    one, two, three = (torch.arange(3 * length, device=device) * 37 + 11).view(3, -1) % words
    parts = one[4:], torch.cat([one[:7], two]), three
    ids = {"prompt_ids": one[None, :4], "completion_ids": torch.cat(parts)[None]}
    masks = {name.replace("ids", "mask"): torch.ones_like(each) for name, each in ids.items()}
    contexts = torch.cat([torch.full_like(part, context) for context, part in enumerate(parts)])
    return {**ids, **masks, "context_ids": contexts[None]}


class LaidOut:
    """Stands in for a model in `GRPOTrainer._get_per_token_logps_and_entropies`, which calls it with rows of a batch.

    Args:
        model: What to call.
        policy: `model` without the wrappers of engines.
        layouts: The one with the fewest tokens is taken; simpler ones are preferred (`WORTH`).
        scored: (B, T) 1 at the tokens to score, of all rows.
        contexts: (B, T) `context_ids` of all rows, or None.
        with_values: Whether to collect the critic's `values`, (rows, W) for each call.
    """

    def __init__(
        self,
        model: Any,
        policy: Any,
        layouts: Sequence[str],
        scored: Tensor,
        contexts: Tensor | None = None,
        with_values: bool = False,
    ) -> None:
        self._model, self._policy, self._layouts = model, policy, layouts
        self._causal_lm = causal_lm_of(policy)
        self._scored, self._contexts, self._row = scored, contexts, 0
        self._with_values = with_values
        self.values: list[Tensor] = []
        self.routing: Routing | None = None
        self._has_router = getattr(self._causal_lm.config.get_text_config(), "output_router_logits", False)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **options: Any) -> Any:
        rows = slice(self._row, self._row + len(input_ids))
        self._row = rows.stop
        before = input_ids.size(1) - self._scored.size(1)
        scored = pad(self._scored[rows].bool(), (before, 0), value=False)
        contexts = None if self._contexts is None else pad(self._contexts[rows].abs(), (before, 0))
        layouts, options = self._layouts, {"output_router_logits": False, **options} if self._has_router else options
        if is_masked := options.get("output_router_logits", False):
            layouts = layouts[:1]  # a router loss counts the tokens that a mask marks, which only padded rows have
        config = self._causal_lm.config.get_text_config(decoder=True)
        width = input_ids.size(1) if rope_of_batch(config) is not None else 0
        plan = plan_of(input_ids, attention_mask, scored, contexts, layouts, width)
        if plan.segments is not None:
            options |= {"position_ids": plan.position_ids, **plan.segments.arguments(self._causal_lm)}
        elif is_masked or layouts[0] == "rows":
            options |= {"attention_mask": plan.attention_mask}
        around = self.routing.around(self._causal_lm, plan, rows, attention_mask) if self.routing else nullcontext()
        with around:
            output = self._run(plan, options)
        for name in ("log_probs", "entropy"):
            if (found := getattr(output, name, None)) is not None:
                setattr(output, name, plan.scatter(found, input_ids))
        if self._with_values:
            self.values.append(plan.scatter(output.critic_values, input_ids))
        return output

    def _run(self, plan: Plan, options: dict[str, Any]) -> Any:
        """The model's output, (1, M) at the positions that predict scored tokens.

        Critic and head run within the wrapped model's forward, as engines expect.
        """
        causal_lm = self._causal_lm
        values: list[Tensor] = []

        def on_backbone(backbone: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            backbone_hook.remove()  # a critic may ask the backbone again
            if self._with_values:
                critic = getattr(causal_lm, CRITIC_ATTRIBUTE)
                critic.unfreeze()
                values.append(plan.predicting(critic(BackboneCall(backbone, args, kwargs, output))))
            return type(output)(**{**output, "last_hidden_state": plan.predicting(output.last_hidden_state)})

        def on_policy(_policy: nn.Module, _args: Any, output: Any) -> Any:
            return CausalLMOutputWithCritic(**output, critic_values=values.pop()) if values else output

        # The backbone is looked up on each call, since FSDP and PEFT replace it.
        backbone_hook = causal_lm.base_model.register_forward_hook(on_backbone, with_kwargs=True)
        policy_hook = self._policy.register_forward_hook(on_policy, prepend=True)
        try:
            return self._model(input_ids=plan.input_ids, shift_labels=plan.labels, **options)
        finally:
            backbone_hook.remove()
            policy_hook.remove()
