# An excerpt of trl 1.16.0, trl.trainer.utils: copyright The HuggingFace Team, licensed
# under the Apache License, Version 2.0. Changed: no comments, no docstrings, another layout.

def add_fused_lm_head(
    model: PreTrainedModel,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
) -> None:
    original_forward = model.forward
    text_config = model.config.get_text_config()
    final_logit_softcapping = getattr(text_config, "final_logit_softcapping", None)
    logit_scale = getattr(text_config, "logit_scale", None)
    if logit_scale is None:
        logit_scale = getattr(text_config, "output_multiplier", None)
    if logit_scale is None:
        logit_scale = getattr(text_config, "lm_head_multiplier", None)
    if logit_scale is None and getattr(text_config, "logits_scaling", None) is not None:
        logits_scaling = text_config.logits_scaling
        logit_scale = logits_scaling if text_config.model_type == "hyperclovax" else 1 / logits_scaling
    logit_scale = 1.0 if logit_scale is None else logit_scale
    backbone_attr = "base_model"
    if text_config is not model.config and Version(transformers.__version__) < Version("5.0.0"):
        backbone_attr = "model"

    @functools.wraps(type(model).forward)
    def _fused_forward(
        self, *args, fused_lm_head=False, labels=None, shift_labels=None, num_items_in_batch=None, **kwargs
    ):
        if not fused_lm_head:
            if labels is not None:
                kwargs["labels"] = labels
            if shift_labels is not None:
                kwargs["shift_labels"] = shift_labels
            if num_items_in_batch is not None:
                kwargs["num_items_in_batch"] = num_items_in_batch
            return original_forward(*args, **kwargs)
        kwargs["use_cache"] = False
        if getattr(text_config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        backbone_outputs = getattr(self, backbone_attr)(*args, **kwargs)
        if shift_labels is None:
            hidden_states = backbone_outputs.last_hidden_state[:, :-1]
            labels = labels[:, 1:]
        else:
            hidden_states = backbone_outputs.last_hidden_state
            labels = shift_labels
        lm_head = self.get_output_embeddings()
        hidden_states = hidden_states.to(lm_head.weight.device)
        labels = labels.to(lm_head.weight.device)
        mask = labels != -100
        autocast_ctx = nullcontext()
        if cast_lm_head_to_fp32:
            hidden_states = hidden_states.float()
            autocast_ctx = torch.autocast(hidden_states.device.type, enabled=False)
        weight, bias = (lm_head.weight, lm_head.bias)
        if isinstance(weight, DTensor):
            weight = weight.full_tensor()
            if bias is not None:
                bias = bias.full_tensor()
        compact = _use_triton(hidden_states.device)
        with autocast_ctx, maybe_gather_lm_head_ctx(weight, bias):
            per_token = _ChunkedLogProbFunction.apply(
                hidden_states[mask] if compact else hidden_states.reshape(-1, hidden_states.size(-1)),
                weight,
                bias,
                labels[mask] if compact else labels.clamp(min=0).reshape(-1),
                temperature,
                _CHUNKED_LOGPROB_CHUNK_SIZE,
                final_logit_softcapping,
                logit_scale,
                outputs,
            )
        if compact:
            per_token = (None if x is None else x.new_zeros(mask.shape).masked_scatter(mask, x) for x in per_token)
        else:
            per_token = (None if x is None else x.view(mask.shape).masked_fill(~mask, 0) for x in per_token)
        log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1 = per_token
        loss = -log_probs.sum() / (mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
        aux_loss = None
        if kwargs.get("output_router_logits"):
            from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

            if Version(transformers.__version__) < Version("5.0.0"):
                num_experts = self.num_experts
                num_experts_per_tok = self.num_experts_per_tok
            else:
                if text_config.model_type == "gpt_oss" and Version("5.0.0") <= Version(
                    transformers.__version__
                ) < Version("5.6.0"):
                    num_experts = self.num_experts
                else:
                    num_experts = text_config.num_experts
                num_experts_per_tok = text_config.num_experts_per_tok
            aux_loss = load_balancing_loss_func(
                backbone_outputs.router_logits, num_experts, num_experts_per_tok, kwargs.get("attention_mask")
            )
            loss = loss + getattr(text_config, "router_aux_loss_coef", 0.0) * aux_loss
        return FusedCausalLMOutput(
            loss=loss,
            log_probs=log_probs,
            entropy=entropy,
            log_sum_sq_probs=log_sum_sq_probs,
            mean_logits=mean_logits,
            is_top1=is_top1,
            label_mask=mask,
            aux_loss=aux_loss,
        )

    model.forward = types.MethodType(_fused_forward, model)
