"""SO-PPO: PPO for agents, with turn-level ratios and advantages from a critic that shares the policy's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.callbacks import SyncRefModelCallback

from sorl_trl.ops import aggregate_turns, is_value_clipped, masked_mean, turn_layout, turn_starts, value_loss, whiten
from sorl_trl.trainers.base_config import TURN_LOSS_TYPE
from sorl_trl.trainers.base_trainer import TurnLevelTrainer
from sorl_trl.trainers.checks.trl_arguments import called_as
from sorl_trl.trainers.critic.build import setup_critic
from sorl_trl.trainers.critic.checkpoint import CRITIC_FOLDER, check_critic_folder, restore_critic, save_critic
from sorl_trl.trainers.critic.experience import Experience, token_experience, turn_experience
from sorl_trl.trainers.critic.health import critic_metrics
from sorl_trl.trainers.critic.model import Critic, ValuesBesideLogps, is_critic_name
from sorl_trl.trainers.critic.optimizer import add_critic_groups, check_deepspeed, hold_policy_back
from sorl_trl.trainers.critic.policy_alone import FollowPolicy, detach_for_good, detached_critic, send_policy_alone
from sorl_trl.trainers.loss.micro_batch import IMAGE_INPUTS, MicroBatch, loss_mask_of, row_scale
from sorl_trl.trainers.loss.turn_metrics import MetricSums
from sorl_trl.trainers.paper import SORL_PAPER
from sorl_trl.trainers.so_ppo_config import SOPPOConfig
from sorl_trl.trainers.turns.recording import ScoredRollout, gather_rows, show_advantages

_PASS = "policy_pass"
"""Field of a micro-batch within its loss: the policy, once it was asked for log-probabilities and values."""
_MEAN_PER_TRAJECTORY = ("grpo", "sapo", "luspo")
"""TRL's loss types that average the tokens of each trajectory first."""


class SOPPOTrainer(TurnLevelTrainer):
    """PPO on trajectories of several turns, with the interface of `trl.GRPOTrainer`.

    Advantages come from a critic (`SOPPOConfig.critic`), so one trajectory per prompt is enough. The critic rides in
    the policy's forward pass and is saved beside it, in `critic/`; `sorl_trl.load_critic` loads it alone. Turns and
    turn rewards are those of [`SOGRPOTrainer`].

    Example:

    ```python
    trainer = SOPPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        args=SOPPOConfig(output_dir="out", steps_per_generation=8),  # 8 updates per rollout
        train_dataset=dataset,
        peft_config=LoraConfig(),
    )
    trainer.train()
    ```

    Raises:
        TypeError: `args` is not a `SOPPOConfig`.
        ValueError: a critic that the model cannot have, or what `SOGRPOTrainer` raises it for.
    """

    config_class: ClassVar[type[SOPPOConfig]] = SOPPOConfig
    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "so-ppo"]
    _name = "SO-PPO"
    _paper: ClassVar[dict[str, str]] = SORL_PAPER
    args: SOPPOConfig
    critic: Critic

    @called_as(GRPOTrainer.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._old_policy: ValuesBesideLogps | None = None
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled:
            check_deepspeed(self.accelerator.state.deepspeed_plugin.deepspeed_config)
        if self.lr_scheduler is not None:
            raise ValueError(
                "`optimizers` holds a scheduler, made for an optimizer without the critic: give the optimizer alone, "
                "and choose a schedule by `lr_scheduler_type`."
            )
        self.critic = setup_critic(self.model, self.args, len(self._tokenizer))
        if self.use_vllm:
            send_policy_alone(self.vllm_generation)
        if self.args.sync_ref_model:
            self.remove_callback(SyncRefModelCallback)
            self.add_callback(FollowPolicy(self.ref_model, self.accelerator))

    # ---------------------------------------------------------------------------------------------------------------
    # Values: from the policy's own forward passes
    # ---------------------------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._old_policy = ValuesBesideLogps(self.model)
        output = super()._generate_and_score_completions(inputs)
        output["value_units"] = self.accelerator.gather(self._value_units(output["turn_ids"]).sum()).sum()
        return output

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any, Any]:
        # TRL's first pass over new trajectories is that of the policy which generated them, if it makes one.
        is_first = self._old_policy is not None and not self._old_policy.was_called
        if is_first and model is self.model and self._trl_scores_old_policy():
            model = self._old_policy
        return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    def _trl_scores_old_policy(self) -> bool:
        """Whether TRL passes over new trajectories first of all with the policy that generated them."""
        micro_batches = self.args.steps_per_generation * self.num_iterations
        is_reused = self.args.gradient_accumulation_steps % micro_batches != 0
        return is_reused or (self.use_vllm and self.vllm_importance_sampling_correction)

    def _of_old_policy(self, output: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """(B, T) log-probabilities and values of the policy that generated `output`.

        Where TRL made no pass for them, because every batch is used for one update, this does.
        """
        assert self._old_policy is not None
        length = output["completion_ids"].size(1)
        if self._old_policy.was_called:
            return output["old_per_token_logps"], self._old_policy.values(length)
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        is_training = self.model.training
        size = self.args.per_device_train_batch_size if is_training else self.args.per_device_eval_batch_size
        images = {name: output[name] for name in IMAGE_INPUTS if name in output}
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            logps, _, _ = self._get_per_token_logps_and_entropies(
                self._old_policy, ids, mask, length, batch_size=size, **images
            )
        return logps, self._old_policy.values(length)

    # ---------------------------------------------------------------------------------------------------------------
    # Advantages
    # ---------------------------------------------------------------------------------------------------------------

    def _set_advantages(self, output: dict[str, Any], rollout: Any, own: slice) -> None:
        old_logps, old_values = self._of_old_policy(output)
        self.critic.unfreeze()  # the reference pass of a PEFT model has frozen it
        self._leave_out(output, ~(rollout.scored & rollout.rewards.isfinite().all(-1))[own])
        token_rewards = self._token_rewards(output, old_logps)
        turn_ids, values, token_rewards = (
            gather_rows(self.accelerator, rows, padding)
            for rows, padding in ((output["turn_ids"], -1), (old_values, 0), (token_rewards, 0))
        )
        # A trajectory that is left out may have been the one with the most turns.
        rewards = rollout.rewards.nan_to_num()[:, : int(turn_ids.max()) + 1]
        build = turn_experience if self.args.advantage_level == "turn" else token_experience
        experience = build(rewards, token_rewards, values, turn_ids, self.args.gamma, self.args.gae_lambda)
        advantages = self._weighed(experience)
        columns = slice(old_values.size(1))  # other ranks may have longer trajectories
        output["advantages"] = experience.on_tokens(advantages, turn_ids)[own, columns]
        output["returns"] = experience.on_tokens(experience.returns, turn_ids)[own, columns]
        output["old_values"] = old_values
        show_advantages(self, advantages[own], experience.unit_turns[own] >= 0)

    def _leave_out(self, output: dict[str, Any], unscored: Tensor) -> None:
        """Take trajectories without a finite reward out of every loss, the critic's too, and count them."""
        loss_mask = loss_mask_of(output)
        left_out = unscored & loss_mask.bool().any(-1)
        keep = ~left_out.unsqueeze(1)
        output["tool_mask"] = output.get("tool_mask", torch.ones_like(loss_mask)) * keep
        output["turn_ids"] = torch.where(keep, output["turn_ids"], -1)
        output["num_items_in_batch"] = self.accelerator.gather(loss_mask_of(output).sum()).sum()
        self._log("trajectories_unscored", left_out.float(), torch.ones_like(left_out))

    def _token_rewards(self, output: dict[str, Any], old_logps: Tensor) -> Tensor:
        """(B, T) what the KL to the reference takes off each token's reward, with `kl_in_reward`."""
        if not self.args.kl_in_reward:
            return torch.zeros_like(old_logps)
        kept = output["turn_ids"] >= 0
        kl = torch.where(kept, old_logps - output["ref_per_token_logps"], 0.0)
        self._log("reward_kl", kl, kept)
        return -self.beta * kl

    def _weighed(self, experience: Experience) -> Tensor:
        """(N, U) the advantages of all ranks, whitened; what they and the values were before is logged."""
        units, values = experience.unit_turns, experience.values
        metrics = critic_metrics(values, experience.rewards_to_go, experience.advantages, units)
        for name, value in metrics.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)
        return whiten(experience.advantages, units >= 0) if self.args.whiten_advantages else experience.advantages

    # ---------------------------------------------------------------------------------------------------------------
    # The value loss
    # ---------------------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        policy = ValuesBesideLogps(model)
        beta = self.beta
        try:
            self.beta = 0.0 if self.args.kl_in_reward else beta
            return super()._compute_loss(policy, {**inputs, _PASS: policy})
        finally:
            self.beta = beta

    def _own_terms(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
        """This micro-batch's share of the clipped value loss of the optimizer step."""
        inputs, clip_range = batch.inputs, self.args.value_clip_range
        kept = self._value_units(batch.turns.turn_ids)
        given = inputs[_PASS].values(kept.size(1)), inputs["old_values"], inputs["returns"]
        # Values on observations and padding are real numbers, of which the loss must not depend.
        values, old_values, returns = (torch.where(kept, each, 0.0) for each in given)
        loss = self._mean_over_units(value_loss(values, old_values, returns, clip_range), kept, batch)
        is_clipped = is_value_clipped(values.detach(), old_values, returns, clip_range)
        metrics = {"critic/value_loss": loss, "critic/value_clip_fraction": (is_clipped.float(), kept)}
        return self.args.vf_coef * loss / self._micro_batches(), metrics

    def _value_units(self, turn_ids: Tensor) -> Tensor:
        """(B, T) bool: where the critic's value is trained, at the start of each turn or at each of its tokens."""
        return turn_starts(turn_ids) if self.args.advantage_level == "turn" else turn_ids >= 0

    def _mean_over_units(self, losses: Tensor, kept: Tensor, batch: MicroBatch) -> Tensor:
        """The mean over turns or tokens, averaged as the policy's loss is over tokens.

        Where TRL divides by the number of tokens of all micro-batches and ranks, so that a gradient does not depend on
        how a batch is split (`"dapo"`, `"cispo"`, `"vespo"`), or by a constant (`"dr_grpo"`), the sum over the
        micro-batch is divided by its share of the units of the whole rollout.
        """
        if self.args.loss_type == TURN_LOSS_TYPE:
            units = torch.where(kept, batch.turns.turn_ids, -1)
            return aggregate_turns(losses, turn_layout(units, batch.turns.num_turns)) * row_scale(batch.inputs)
        if self.args.loss_type in _MEAN_PER_TRAJECTORY:
            return masked_mean(losses, kept, dim=1).mean() * row_scale(batch.inputs)
        if self.args.loss_type == "bnpo":
            return masked_mean(losses, kept)
        micro_batches = self.args.steps_per_generation if self.model.training else 1
        units = batch.inputs["value_units"].clamp(min=1) / (self.accelerator.num_processes * micro_batches)
        return torch.where(kept, losses, 0.0).sum() / units

    # ---------------------------------------------------------------------------------------------------------------
    # Optimizer
    # ---------------------------------------------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """TRL's optimizer, with the critic's parameters in groups of their own learning rate."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        add_critic_groups(optimizer, self.model, self.args.critic_learning_rate)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """TRL's scheduler, with a learning rate of 0 for the policy during the critic's warm-up."""
        is_new = self.lr_scheduler is None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if is_new and self.args.critic_warmup_steps:
            hold_policy_back(scheduler, self.args.critic_warmup_steps)
        return scheduler

    # ---------------------------------------------------------------------------------------------------------------
    # Checkpoints: the policy as if it had no critic, and the critic in `critic/` beside it
    # ---------------------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self.critic.unfreeze()  # under ZeRO-3, only what requires a gradient is gathered
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        output_dir = output_dir if output_dir is not None else self.args.output_dir
        if self.args.should_save:
            save_critic(self.critic, self.model, Path(output_dir) / CRITIC_FOLDER, state_dict)
        state_dict = self.model.state_dict() if state_dict is None else state_dict
        super()._save(output_dir, {name: tensor for name, tensor in state_dict.items() if not is_critic_name(name)})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint) / CRITIC_FOLDER
        check_critic_folder(self.critic, folder)
        with detached_critic(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        restore_critic(self.critic, self.model, folder)

    def _load_best_model(self) -> None:
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:  # they load their own checkpoint, critic included
            super()._load_best_model()
            return
        with detached_critic(self.model):
            super()._load_best_model()
        restore_critic(self.critic, self.model, Path(self.state.best_model_checkpoint) / CRITIC_FOLDER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:  # DeepSpeed has by now loaded all weights, without `_load_from_checkpoint`
            check_critic_folder(self.critic, Path(checkpoint) / CRITIC_FOLDER)
        super()._load_optimizer_and_scheduler(checkpoint)

    def detach_critic(self) -> Any:
        """Take the critic out of the model for good, and return the model: the policy alone, as TRL made it.

        For whatever does not go through the trainer, such as `merge_and_unload()`, the model's own
        `save_pretrained`, or another trainer. This trainer cannot train or save after it.
        """
        model = self.accelerator.unwrap_model(self.model)
        detach_for_good(model, self.critic)
        return model

    # OLD BASE SHIM
    def _add_advantages(self, output, rollout):
        from types import SimpleNamespace

        g = SimpleNamespace(
            rewards=gather_rows(self.accelerator, rollout.turn_rewards),
            scored=self.accelerator.gather(rollout.scored.long()).bool(),
        )
        rows = len(output["turn_ids"])
        first = self.accelerator.process_index * rows
        self._set_advantages(output, g, slice(first, first + rows))

    def _log(self, name, values, keep):
        sums = MetricSums()
        sums.add_mean(name, values, keep)
        mode = "train" if self.model.training else "eval"
        for key, value in sums.reduce(self.accelerator).items():
            self._metrics[mode][key].append(value)

    def _with_own_terms(self, loss, batch):
        loss = super()._with_own_terms(loss, batch)
        own, metrics = self._own_terms(batch)
        for name, value in metrics.items():
            if isinstance(value, tuple):
                self._metric_log.add_mean(name, *value)
            else:
                self._metric_log.add_rank_mean(name, value)
        return loss + own
