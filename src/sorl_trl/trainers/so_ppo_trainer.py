"""SO-PPO: PPO for agents, with turn-level ratios and advantages from a critic that shares the policy's weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from peft import PeftModel
from torch import Tensor
from trl.trainer.callbacks import SyncRefModelCallback

from sorl_trl.methods import GAE, Experience, MicroBatch
from sorl_trl.ops import (
    explained_variance,
    is_value_clipped,
    masked_mean,
    turn_broadcast,
    turn_rewards_to_tokens,
    value_loss,
)
from sorl_trl.trainers.base import TurnLevelTrainer
from sorl_trl.trainers.checks import check_trained, disable_noise
from sorl_trl.trainers.config import SOPPOConfig
from sorl_trl.trainers.critic import Critic, FollowPolicy, detached_critic, is_critic_name
from sorl_trl.trainers.critic_checkpoint import CRITIC_FOLDER, find_critic, restore_critic, save_critic, setup_critic
from sorl_trl.trainers.forward import Forward, Pass
from sorl_trl.trainers.optimizer_step import PolicyRest, clip_apart, move_to_own_groups
from sorl_trl.trainers.pack import Rollout


class SOPPOTrainer(TurnLevelTrainer):
    """PPO on trajectories of several turns, with the interface of `trl.GRPOTrainer`.

    Advantages come from a critic (`SOPPOConfig.critic`), so one trajectory per prompt is enough. The critic runs in
    the policy's forward pass and is saved beside the policy, in `critic/`; `sorl_trl.load_critic` loads it alone.
    Everything else works as in [`SOGRPOTrainer`], with a [`SOPPOConfig`] as `args`.

    Raises:
        TypeError: `args` is not a `SOPPOConfig`.
        ValueError: The model cannot have the critic, the method has no `GAE`, or any reason of `SOGRPOTrainer`.
    """

    config_class: ClassVar[type[SOPPOConfig]] = SOPPOConfig
    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "so-ppo"]
    _name = "SO-PPO"
    args: SOPPOConfig
    critic: Critic
    _has_critic: ClassVar[bool] = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled:
            config = self.accelerator.state.deepspeed_plugin.deepspeed_config
            if named := [name for name in ("optimizer", "scheduler") if name in config]:
                raise ValueError(
                    f"The DeepSpeed configuration has {named[0]!r}: {config[named[0]]}, which has one learning rate "
                    "for policy and critic. Remove it there, and set `optim`, `learning_rate`, "
                    "`critic_learning_rate` and `lr_scheduler_type` in `SOPPOConfig` instead."
                )
        if self.lr_scheduler is not None:
            raise ValueError(
                "`optimizers` has a scheduler for an optimizer without the critic: pass only the optimizer, and "
                "choose a schedule with `lr_scheduler_type`."
            )
        check_trained(self.model)
        self.critic = setup_critic(self.model, self.args, len(self._tokenizer))
        self._forward = Forward(self._host)  # again, with the critic's model
        if self.args.disable_dropout:
            disable_noise(self.model)
        is_adapter = self.critic.kind == "adapter"
        if is_adapter and self._host.checkpoints_activations:
            raise ValueError(  # it would recompute layers with the policy's adapter
                "`critic` is 'adapter', which FSDP's `fsdp_activation_checkpointing` does not support: set the latter "
                "to False, and `gradient_checkpointing` to True."
            )
        if self.args.critic_warmup_steps:
            self.add_callback(PolicyRest(self.args.critic_warmup_steps))
        if self.args.sync_ref_model:
            self.remove_callback(SyncRefModelCallback)
            self.add_callback(FollowPolicy(self.ref_model, self.accelerator))

    # ---------------------------------------------------------------------------------------------------------------
    # Advantages
    # ---------------------------------------------------------------------------------------------------------------

    @property
    def _credit(self) -> GAE:
        return cast(GAE, self.method.credit)

    def _set_advantages(self, rollout: Rollout) -> Tensor:
        batch, scored, old_values = rollout.batch, rollout.scored, rollout.batch["old_values"]
        self.critic.unfreeze()  # the reference pass of a PEFT model has frozen it
        rollout.drop(rollout.own(scored.scored))
        batch["value_units"] = self.accelerator.gather(self._credit.valued(batch["turn_ids"]).sum()).sum()
        turn_ids = rollout.gather(batch["turn_ids"], padding=-1)
        rewards, values = turn_rewards_to_tokens(scored.rewards, turn_ids), rollout.gather(old_values)
        experience = self._credit(rewards, values, turn_ids, self.method.gamma)
        for name, value in critic_metrics(experience).items():
            self._host.metrics[name].append(value)
        advantages = self._credit.scaled(experience)
        for name, of_units in (("advantages", advantages), ("returns", experience.returns)):
            own = rollout.own(turn_broadcast(of_units, experience.units))
            batch[name] = own[:, : old_values.size(1)]  # other processes may have longer trajectories
        return masked_mean(advantages, experience.mask, dim=1)

    # ---------------------------------------------------------------------------------------------------------------
    # The value loss
    # ---------------------------------------------------------------------------------------------------------------

    def _own_term(self, batch: MicroBatch, scores: Pass) -> tuple[Tensor, dict[str, Any]]:
        """The clipped value loss of the micro-batch."""
        inputs, clip_range = batch.inputs, self.args.value_clip_range
        kept = self._credit.valued(inputs["turn_ids"])
        assert scores.values is not None
        given = scores.values, inputs["old_values"], inputs["returns"]
        # The loss must not depend on the values at observations and padding.
        values, old_values, returns = (torch.where(kept, each, 0.0) for each in given)
        losses = value_loss(values, old_values, returns, clip_range)
        loss = self.method.mean(losses, kept, inputs["value_units"], batch)
        is_clipped = is_value_clipped(values.detach(), old_values, returns, clip_range)
        metrics = {"critic/value_loss": loss, "critic/value_clip_fraction": (is_clipped.float(), kept)}
        return self.args.vf_coef * loss, metrics

    # ---------------------------------------------------------------------------------------------------------------
    # Optimizer
    # ---------------------------------------------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """TRL's optimizer, or the user's, with the critic's parameters in groups with their own learning rates."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if any(group.get("critic") for group in optimizer.param_groups):
            return optimizer
        rate = self.args.critic_learning_rate
        if rate is None:
            is_full_beside_peft = self.critic.kind == "model" and isinstance(self.model, PeftModel)
            rate = (1 if is_full_beside_peft else 10) * self.args.learning_rate
        own, of_head = dict(self.model.named_parameters()), {id(p) for p in self.critic.head.parameters()}
        head = {name: p for name, p in own.items() if id(p) in of_head}
        rest = {name: p for name, p in own.items() if is_critic_name(name) and name not in head}
        # A decay that suits the rate of other parameters would pull the head's values to 0.
        move_to_own_groups(optimizer, head, lr=self.args.value_head_learning_rate, weight_decay=0.0, critic=True)
        move_to_own_groups(optimizer, rest, lr=rate, critic=True)
        return optimizer

    def _clip_grad_norm(self, model: Any) -> Any:
        # DeepSpeed clips in its own step, and FSDP1 and several meshes need the norm over all parameters.
        is_fsdp1 = self.is_fsdp_enabled and not self.accelerator.is_fsdp2
        if self.is_deepspeed_enabled or is_fsdp1 or self._has_mixed_mesh_grads(model):
            return super()._clip_grad_norm(model)
        self._normalize_gradient()
        named = [*model.named_parameters()]
        parts = [[p for name, p in named if is_critic_name(name) == is_critics] for is_critics in (False, True)]
        policy_norm, critic_norm = clip_apart(self.accelerator, parts, self.args.max_grad_norm)
        self._metrics["train"]["critic/grad_norm"].append(float(critic_norm))
        return policy_norm

    # ---------------------------------------------------------------------------------------------------------------
    # Checkpoints: the policy as if it had no critic, and the critic in `critic/` beside it
    # ---------------------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        output_dir = output_dir if output_dir is not None else self.args.output_dir
        state_dict = self.model.state_dict() if state_dict is None else state_dict
        if self.args.should_save:
            save_critic(self.critic, self.model, Path(output_dir) / CRITIC_FOLDER, state_dict)
        super()._save(output_dir, {name: tensor for name, tensor in state_dict.items() if not is_critic_name(name)})

    def _load_cycle(self, checkpoint: Path) -> None:
        find_critic(checkpoint, self.critic.kind)  # DeepSpeed and FSDP load all weights at once, of whatever kind
        super()._load_cycle(checkpoint)

    def _load_weights(self, checkpoint: str, load: Callable[[], None]) -> None:
        if self._host.has_engine:  # it loads its own checkpoint with the critic
            load()
            return
        with detached_critic(self.model):
            super()._load_weights(checkpoint, load)
        restore_critic(self.critic, self.model, checkpoint)


def critic_metrics(experience: Experience) -> dict[str, float]:
    """Statistics of values and advantages; docs/reference/metrics.md explains the names.

    "Returns" are rewards to go, which do not depend on the critic. Undefined statistics are NaN, which TRL's averages
    skip: the explained variance of equal returns, the standard deviation of fewer than two advantages, the mean of
    none. Positions without a unit are ignored.
    """
    given = experience.values, experience.rewards_to_go, experience.advantages
    values, returns, advantages = (each[experience.mask].float() for each in given)
    metrics = {
        "critic/explained_variance": explained_variance(values, returns, torch.ones_like(values)),
        "critic/value_mean": values.mean(),
        "critic/return_mean": returns.mean(),
        "advantages/mean": advantages.mean(),
        "advantages/std": advantages.std() if len(advantages) > 1 else advantages.new_tensor(torch.nan),
    }
    return dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))
