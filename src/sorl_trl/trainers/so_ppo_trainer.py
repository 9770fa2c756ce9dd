"""SO-PPO: PPO for agents, with turn-level ratios and advantages from a critic that shares the policy's weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from accelerate.logging import get_logger
from torch import Tensor
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from sorl_trl.ops import aggregate_turns, is_value_clipped, masked_mean, turn_layout, turn_starts, value_loss, whiten
from sorl_trl.trainers.base_config import TURN_LOSS_TYPE
from sorl_trl.trainers.checks.trl_arguments import called_as
from sorl_trl.trainers.critic.experience import Experience, token_experience, turn_experience
from sorl_trl.trainers.critic.health import CriticWatch, critic_metrics
from sorl_trl.trainers.critic.model import ValueRecorder, ValuesBesideLogps
from sorl_trl.trainers.critic.trainer import CriticTrainer
from sorl_trl.trainers.loss.micro_batch import IMAGE_INPUTS, MicroBatch, loss_mask_of, row_scale
from sorl_trl.trainers.loss.turn_metrics import MetricSums
from sorl_trl.trainers.paper import SORL_PAPER
from sorl_trl.trainers.so_ppo_config import SOPPOConfig
from sorl_trl.trainers.turns.recording import ScoredRollout, gather_rows, show_advantages

logger = get_logger(__name__)

_MEAN_PER_TRAJECTORY = ("grpo", "sapo", "luspo")
"""TRL's loss types that average the tokens of each trajectory first."""
_MEAN_PER_MICRO_BATCH = ("bnpo",)
"""TRL's loss type that pools the tokens of a micro-batch; those left pool over the whole optimizer step."""


class SOPPOTrainer(CriticTrainer):
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

    @called_as(GRPOTrainer.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._value_recorder: ValueRecorder | None = None
        super().__init__(*args, **kwargs)
        self._watch = CriticWatch(self.args.critic_warmup_steps)

    # ---------------------------------------------------------------------------------------------------------------
    # Values: from the policy's own forward passes
    # ---------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _recording_values(self) -> Iterator[ValueRecorder]:
        """Within it, the next pass of the policy gives values too, which the recorder keeps."""
        self._value_recorder = recorder = ValueRecorder()
        try:
            yield recorder
        finally:
            self._value_recorder = None

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Any, Any]:
        recorder = self._value_recorder
        if recorder is None or recorder.is_done or model is self.ref_model:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        with recorder.beside_logps(model, logits_to_keep) as with_values:
            return super()._get_per_token_logps_and_entropies(
                with_values, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        # TRL's first pass over new trajectories is that of the policy which generated them, if it makes one.
        with self._recording_values() if self._trl_scores_old_policy() else nullcontext():
            output = super()._generate_and_score_completions(inputs)
        output["value_units"] = self.accelerator.gather(self._value_units(output["turn_ids"]).sum()).sum()
        return output

    def _add_advantages(self, output: dict[str, Any], rollout: ScoredRollout) -> None:
        old_logps, old_values = self._old_policy(output)
        self.critic.unfreeze()  # the reference pass of a PEFT model has frozen it
        turn_rewards = rollout.turn_rewards
        self._leave_out(output, rollout.scored & turn_rewards.isfinite().all(-1))
        experience = self._experience(output, turn_rewards.nan_to_num(), old_logps, old_values)
        advantages = self._advantages(experience)
        turn_ids = output["turn_ids"]
        output["advantages"] = experience.on_tokens(advantages, turn_ids)
        output["returns"] = experience.on_tokens(experience.returns, turn_ids)
        output["old_values"] = old_values
        show_advantages(self, advantages, experience.unit_turns >= 0)

    def _trl_scores_old_policy(self) -> bool:
        """Whether TRL passes over new trajectories first of all with the policy that generated them."""
        micro_batches = self.args.steps_per_generation * self.num_iterations
        is_reused = self.args.gradient_accumulation_steps % micro_batches != 0
        return is_reused or (self.use_vllm and self.vllm_importance_sampling_correction)

    def _old_policy(self, output: dict[str, Any]) -> tuple[Tensor | None, Tensor]:
        """(B, T) log-probabilities, where known, and values of the policy that generated `output`.

        They come from the pass in which TRL scores the old policy. Where it needs none, because every batch is used
        for one update, a pass of our own gives them.
        """
        if self._value_recorder is not None:
            return output["old_per_token_logps"], self._value_recorder.values
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        is_training = self.model.training
        size = self.args.per_device_train_batch_size if is_training else self.args.per_device_eval_batch_size
        images = {name: output[name] for name in IMAGE_INPUTS if name in output}
        length = output["completion_ids"].size(1)
        model = ValuesBesideLogps(self.model, values_only=not self.args.kl_in_reward)
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            logps, _, _ = super()._get_per_token_logps_and_entropies(
                model, ids, mask, length, batch_size=size, **images
            )
        return logps if self.args.kl_in_reward else None, model.values(length)

    # ---------------------------------------------------------------------------------------------------------------
    # Advantages
    # ---------------------------------------------------------------------------------------------------------------

    def _leave_out(self, output: dict[str, Any], scored: Tensor) -> None:
        """Take trajectories without a finite reward out of every loss, the critic's too, and count them."""
        loss_mask = loss_mask_of(output)
        left_out = ~scored & loss_mask.bool().any(-1)
        if left_out.any():
            keep = (~left_out).unsqueeze(1)
            output["tool_mask"] = output.get("tool_mask", torch.ones_like(loss_mask)) * keep
            output["turn_ids"] = torch.where(keep, output["turn_ids"], -1)
        # Every rank takes part in the sum, whether or not it leaves a trajectory out.
        output["num_items_in_batch"] = self.accelerator.gather(loss_mask_of(output).sum()).sum()
        self._log_of_rollout("trajectories_unscored", left_out.float(), torch.ones_like(left_out))

    def _experience(
        self, output: dict[str, Any], turn_rewards: Tensor, old_logps: Tensor | None, old_values: Tensor
    ) -> Experience:
        turn_ids = output["turn_ids"]
        token_rewards = torch.zeros_like(old_values)
        if self.args.kl_in_reward:
            kl = torch.where(turn_ids >= 0, old_logps - output["ref_per_token_logps"], 0.0)
            token_rewards = -self.beta * kl
            self._log_of_rollout("reward_kl", kl, turn_ids >= 0)
        # A trajectory that is masked as truncated may have been the one with the most turns.
        turn_rewards = turn_rewards[:, : int(turn_ids.max()) + 1]
        build = turn_experience if self.args.advantage_level == "turn" else token_experience
        return build(turn_rewards, token_rewards, old_values, turn_ids, self.args.gamma, self.args.gae_lambda)

    def _log_of_rollout(self, name: str, values: Tensor, keep: Tensor) -> None:
        """Log the mean over all ranks' `values` where `keep`: ranks with more of them count more."""
        sums = MetricSums()
        sums.add_mean(name, values, keep)
        mode = "train" if self.model.training else "eval"
        for key, value in sums.reduce(self.accelerator).items():
            self._metrics[mode][key].append(value)

    def _advantages(self, experience: Experience) -> Tensor:
        """(B, U), whitened over all ranks; what they and the values were before is logged."""
        unit_turns = gather_rows(self.accelerator, experience.unit_turns, padding=-1)
        advantages = gather_rows(self.accelerator, experience.advantages)
        values, rewards = (
            gather_rows(self.accelerator, experience.values),
            gather_rows(self.accelerator, experience.rewards_to_go),
        )
        mode = "train" if self.model.training else "eval"
        metrics = critic_metrics(values, rewards, advantages, unit_turns)
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)
        if mode == "train":
            warning = self._watch.observe(metrics["critic/explained_variance"], self.state.global_step)
            if warning is not None:
                logger.warning(warning)
        if not self.args.whiten_advantages:
            return experience.advantages
        rows, columns = experience.advantages.shape
        first = self.accelerator.process_index * rows
        return whiten(advantages, unit_turns >= 0)[first : first + rows, :columns]

    # ---------------------------------------------------------------------------------------------------------------
    # The loss
    # ---------------------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        beta = self.beta
        try:
            self.beta = 0.0 if self.args.kl_in_reward else beta
            with self._recording_values():
                return super()._compute_loss(model, inputs)
        finally:
            self.beta = beta

    def _with_own_terms(self, loss: Tensor, batch: MicroBatch) -> Tensor:
        assert self._value_recorder is not None
        loss = super()._with_own_terms(loss, batch)
        return loss + self.args.vf_coef * self._value_loss(self._value_recorder.values, batch)

    def _value_units(self, turn_ids: Tensor) -> Tensor:
        """(B, T) bool: where the critic's value is trained, at the start of each turn or at each of its tokens."""
        return turn_starts(turn_ids) if self.args.advantage_level == "turn" else turn_ids >= 0

    def _value_loss(self, values: Tensor, batch: MicroBatch) -> Tensor:
        """This micro-batch's share of the clipped value loss of the optimizer step."""
        inputs, clip_range = batch.inputs, self.args.value_clip_range
        kept = self._value_units(batch.turns.turn_ids)
        # Values on observations and padding are real numbers, but nobody's business.
        values, old_values = torch.where(kept, values, 0.0), torch.where(kept, inputs["old_values"], 0.0)
        returns = torch.where(kept, inputs["returns"], 0.0)
        losses = value_loss(values, old_values, returns, clip_range)
        loss = self._mean_over_units(losses, kept, batch)
        is_clipped = is_value_clipped(values.detach(), old_values, returns, clip_range)
        self._metric_log.add_rank_mean("critic/value_loss", loss)
        self._metric_log.add_mean("critic/value_clip_fraction", is_clipped.float(), kept)
        return loss / self._micro_batches()

    def _mean_over_units(self, losses: Tensor, kept: Tensor, batch: MicroBatch) -> Tensor:
        """The mean over turns or tokens, averaged as the policy's loss is over tokens.

        Where TRL divides by the number of tokens of all micro-batches and ranks, so that a gradient does not depend on
        how a batch is split (`"dapo"`, `"cispo"`, `"vespo"`), or by a constant (`"dr_grpo"`, `"minirl"`), the sum over
        the micro-batch is divided by its share of the units of the whole rollout.
        """
        if self.args.loss_type == TURN_LOSS_TYPE:
            units = torch.where(kept, batch.turns.turn_ids, -1)
            return aggregate_turns(losses, turn_layout(units, batch.turns.num_turns)) * row_scale(batch.inputs)
        if self.args.loss_type in _MEAN_PER_TRAJECTORY:
            return masked_mean(losses, kept, dim=1).mean() * row_scale(batch.inputs)
        if self.args.loss_type in _MEAN_PER_MICRO_BATCH:
            return masked_mean(losses, kept)
        micro_batches = self.args.steps_per_generation if self.model.training else 1
        units = batch.inputs["value_units"].clamp(min=1) / (self.accelerator.num_processes * micro_batches)
        return torch.where(kept, losses, 0.0).sum() / units
