# An excerpt of trl 1.16.0, trl.trainer.grpo_trainer: copyright The HuggingFace Team, licensed
# under the Apache License, Version 2.0. Changed: no comments, no docstrings, another layout.

def _compute_loss(self, model, inputs):
    prompt_ids, prompt_mask = (inputs["prompt_ids"], inputs["prompt_mask"])
    completion_ids, completion_mask = (inputs["completion_ids"], inputs["completion_mask"])
    input_ids = torch.cat([prompt_ids, completion_ids], dim=1)
    attention_mask = torch.cat([prompt_mask, completion_mask], dim=1)
    logits_to_keep = completion_ids.size(1)
    mask = completion_mask if "tool_mask" not in inputs else completion_mask * inputs["tool_mask"]
    per_token_logps, entropies, aux_loss = self._get_per_token_logps_and_entropies(
        model,
        input_ids,
        attention_mask,
        logits_to_keep,
        compute_entropy=True,
        compute_aux_loss=self.aux_loss_enabled,
        pixel_values=inputs.get("pixel_values"),
        image_grid_thw=inputs.get("image_grid_thw"),
        num_images=inputs.get("num_images"),
        pixel_attention_mask=inputs.get("pixel_attention_mask"),
        spatial_shapes=inputs.get("spatial_shapes"),
        num_tiles=inputs.get("num_tiles"),
        image_sizes=inputs.get("image_sizes"),
        token_type_ids=inputs.get("token_type_ids"),
        mm_token_type_ids=inputs.get("mm_token_type_ids"),
        image_position_ids=inputs.get("image_position_ids"),
    )
    if self.top_entropy_quantile < 1.0:
        entropy_mask = self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)
    else:
        entropy_mask = None
    advantages = inputs["advantages"]
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    old_per_token_logps = inputs.get("old_per_token_logps")
    old_per_token_logps = per_token_logps.detach() if old_per_token_logps is None else old_per_token_logps
    if self.off_policy_mask_threshold is not None:
        sampling_per_token_logps = inputs.get("sampling_per_token_logps", old_per_token_logps)
        off_policy_mask = self.get_off_policy_mask(
            advantages=advantages,
            per_token_logps=per_token_logps,
            sampling_per_token_logps=sampling_per_token_logps,
            mask=mask,
            off_policy_threshold=self.off_policy_mask_threshold,
        )
    log_ratio = per_token_logps - old_per_token_logps
    if self.importance_sampling_level == "token":
        log_importance_weights = log_ratio
    elif self.importance_sampling_level == "sequence":
        log_importance_weights = (log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)
        log_importance_weights = log_importance_weights.unsqueeze(-1)
    else:
        raise ValueError(
            f"Unknown importance sampling level: {self.importance_sampling_level}. Possible values are 'token' and 'sequence'."
        )
    coef_1 = torch.exp(log_importance_weights)
    if self.beta != 0.0:
        ref_per_token_logps = inputs["ref_per_token_logps"]
        per_token_kl = torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1
        if self.args.use_bias_correction_kl:
            per_token_kl = per_token_kl * coef_1
    if self.loss_type == "cispo":
        clamped_ratios = torch.clamp(coef_1, max=self.epsilon_high).detach()
        per_token_loss = -clamped_ratios * advantages * per_token_logps
    elif self.loss_type in ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]:
        coef_2 = torch.clamp(coef_1, 1 - self.epsilon_low, 1 + self.epsilon_high)
        if self.args.delta is not None:
            coef_1 = torch.clamp(coef_1, max=self.args.delta)
        per_token_loss1 = coef_1 * advantages
        per_token_loss2 = coef_2 * advantages
        per_token_loss = -torch.min(per_token_loss1, per_token_loss2)
    elif self.loss_type == "sapo":
        temperatures = torch.where(advantages > 0, self.args.sapo_temperature_pos, self.args.sapo_temperature_neg)
        soft_coef_1 = torch.sigmoid(temperatures * (coef_1 - 1)) * 4 / temperatures
        per_token_loss = -soft_coef_1 * advantages
    elif self.loss_type == "vespo":
        phi_seq = self.get_gamma_weights(
            advantages=advantages,
            log_ratio_per_token=log_ratio,
            mask=mask,
            importance_sampling_ratio=inputs.get("importance_sampling_ratio"),
            k_pos=self.args.vespo_k_pos,
            lambda_pos=self.args.vespo_lambda_pos,
            k_neg=self.args.vespo_k_neg,
            lambda_neg=self.args.vespo_lambda_neg,
        )
        per_token_loss = -phi_seq * advantages * per_token_logps
    else:
        raise ValueError(f"Unknown loss type: {self.loss_type}")
    if self.off_policy_mask_threshold is not None:
        per_token_loss = per_token_loss * off_policy_mask
    if entropy_mask is not None:
        per_token_loss = per_token_loss * entropy_mask
    if self.use_vllm and self.vllm_importance_sampling_correction and (self.loss_type != "vespo"):
        per_token_loss = per_token_loss * inputs["importance_sampling_ratio"]
    if self.beta != 0.0:
        per_token_loss = per_token_loss + self.beta * per_token_kl
    mode = "train" if self.model.training else "eval"
    if self.loss_type in ["grpo", "sapo"]:
        loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
        normalizer = self.current_gradient_accumulation_steps if mode == "train" else 1.0
        policy_loss = loss.detach()
        loss = loss / normalizer
    elif self.loss_type == "bnpo":
        loss = (per_token_loss * mask).sum() / mask.sum().clamp(min=1.0)
        normalizer = self.current_gradient_accumulation_steps if mode == "train" else 1.0
        policy_loss = loss.detach()
        loss = loss / normalizer
    elif self.loss_type == "dr_grpo":
        loss = (per_token_loss * mask).sum() / (per_token_loss.size(0) * self.max_completion_length)
        normalizer = self.current_gradient_accumulation_steps if mode == "train" else 1.0
        policy_loss = loss.detach()
        loss = loss / normalizer
    elif self.loss_type in ["cispo", "dapo", "vespo"]:
        normalizer = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        if mode == "train":
            normalizer = normalizer * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        loss = (per_token_loss * mask).sum() / normalizer
        policy_loss = loss.detach()
    elif self.loss_type == "luspo":
        loss = (per_token_loss * mask).sum(-1).mean()
        normalizer = self.current_gradient_accumulation_steps if mode == "train" else 1.0
        policy_loss = loss.detach()
        loss = loss / normalizer
    else:
        raise ValueError(f"Unknown loss type: {self.loss_type}")
    if self._entropy_bonus_enabled:
        effective_mask = mask if entropy_mask is None else mask * entropy_mask
        accumulation_factor = self.current_gradient_accumulation_steps if mode == "train" else 1.0
        entropy_loss = (entropies * effective_mask).sum() / effective_mask.sum().clamp(min=1.0) / accumulation_factor
        if self.use_adaptive_entropy:
            apply_coef = self.entropy_coef if self._last_world_entropy <= self.args.entropy_target else 0.0
        else:
            apply_coef = self.entropy_coef
        loss = loss - apply_coef * entropy_loss
        self._metrics[mode]["policy_loss"].append(self.accelerator.gather(policy_loss).nanmean().item())
        if self.use_adaptive_entropy and mode == "train":
            stats = torch.stack([(entropies * effective_mask).sum(), effective_mask.sum()]).detach()
            if self._entropy_window_stats is None:
                self._entropy_window_stats = stats
            else:
                self._entropy_window_stats = self._entropy_window_stats + stats
            if self.accelerator.sync_gradients:
                window_stats = self.accelerator.reduce(self._entropy_window_stats, reduction="sum")
                world_entropy = (window_stats[0] / window_stats[1].clamp(min=1.0)).item()
                if world_entropy <= self.args.entropy_target:
                    self.entropy_coef = min(
                        self.entropy_coef + self.args.entropy_coef_delta, self.args.entropy_coef_max
                    )
                else:
                    self.entropy_coef = max(
                        self.entropy_coef - self.args.entropy_coef_delta, self.args.entropy_coef_min
                    )
                self._last_world_entropy = world_entropy
                self._entropy_window_stats = None
        if mode == "train" and self.accelerator.sync_gradients:
            self._metrics[mode]["entropy_coef"].append(self.entropy_coef)
    if self.aux_loss_enabled:
        normalizer = self.current_gradient_accumulation_steps if mode == "train" else 1.0
        loss = loss + self.router_aux_loss_coef * aux_loss / normalizer
        self._metrics[mode]["aux_loss"].append(self.accelerator.gather_for_metrics(aux_loss).mean().item())

    def masked_seq_mean(x):
        if x.shape[1] == 1:
            return x.squeeze(1)
        return (x * mask).sum(-1) / mask.sum(-1)

    def global_masked_mean(x):
        if x.shape[1] == 1:
            local_sum, local_count = (x.sum(), torch.tensor(float(x.shape[0]), device=x.device))
        else:
            local_sum, local_count = ((x * mask).sum(), mask.sum().float())
        totals = self.accelerator.reduce(torch.stack([local_sum, local_count]), reduction="sum")
        return (totals[0] / totals[1].clamp(min=1.0)).item()

    if self.beta != 0.0:
        self._metrics[mode]["kl"].append(global_masked_mean(per_token_kl))
    self._metrics[mode]["entropy"].append(global_masked_mean(entropies))
    if self.loss_type in ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]:
        is_low_clipped = (coef_1 < 1 - self.epsilon_low) & (advantages < 0)
        is_high_clipped = (coef_1 > 1 + self.epsilon_high) & (advantages > 0)
        is_region_clipped = is_low_clipped | is_high_clipped
        self._metrics[mode]["clip_ratio/low_mean"].append(global_masked_mean(is_low_clipped.float()))
        self._metrics[mode]["clip_ratio/high_mean"].append(global_masked_mean(is_high_clipped.float()))
        self._metrics[mode]["clip_ratio/region_mean"].append(global_masked_mean(is_region_clipped.float()))
        gathered_low_clip = self.accelerator.gather(masked_seq_mean(is_low_clipped.float()))
        self._metrics[mode]["clip_ratio/low_min"].append(nanmin(gathered_low_clip).item())
        gathered_high_clip = self.accelerator.gather(masked_seq_mean(is_high_clipped.float()))
        self._metrics[mode]["clip_ratio/high_max"].append(nanmax(gathered_high_clip).item())
    elif self.loss_type == "cispo":
        is_cispo_clipped = (coef_1 > self.epsilon_high) & (advantages > 0)
        self._metrics[mode]["cispo_clip_ratio"].append(global_masked_mean(is_cispo_clipped.float()))
    elif self.loss_type == "vespo":
        self._metrics[mode]["vespo/phi_seq_mean"].append(global_masked_mean(phi_seq))
    return loss
