# An excerpt of trl 1.16.0, trl.trainer.grpo_trainer: copyright The HuggingFace Team, licensed
# under the Apache License, Version 2.0. Changed: no comments, no docstrings, another layout.

def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
    device = self.accelerator.device
    if self.use_vllm:
        if self.state.global_step != self._last_loaded_step:
            with profiling_context(self, "sync_weights"):
                self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step
        _, completion_ids, logprobs, _ = self.vllm_generation.generate(
            prompts=prompt_ids,
            images=images,
            num_generations=num_generations,
            profiler=profiling_context(self, "vLLM.generate"),
        )
        logprobs = [[lp[0] for lp in seq] for seq in logprobs]
    elif self.use_transformers_continuous_batching:
        with (
            profiling_context(self, "transformers.generate_batch"),
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as unwrapped_model,
            torch.no_grad(),
            self._dist.summon_full_params(self.model_wrapped, recurse=False),
        ):
            if self.args.bf16:
                unwrapped_model.to(torch.bfloat16)
            elif self.args.fp16:
                unwrapped_model.to(torch.float16)
            if self.args.cast_lm_head_to_fp32:
                unwrapped_model.lm_head.to(torch.float32)
            all_outputs = unwrapped_model.generate_batch(
                prompt_ids,
                generation_config=self.generation_config,
                continuous_batching_config=self.continuous_batching_config,
                progress_bar=False,
            )
            unwrapped_model.train()
        completion_ids = [output.generated_tokens for output in all_outputs.values()]
        logprobs = None
    else:
        prompt_tensors = [torch.tensor(ids) for ids in prompt_ids]
        padded_ids = pad(
            prompt_tensors,
            padding_value=self._tokenizer.pad_token_id,
            padding_side="left",
            pad_to_multiple_of=self.pad_to_multiple_of,
        )
        attention_mask = pad(
            [torch.ones_like(t) for t in prompt_tensors],
            padding_value=0,
            padding_side="left",
            pad_to_multiple_of=self.pad_to_multiple_of,
        )
        generate_inputs = {"input_ids": padded_ids, "attention_mask": attention_mask}
        for k, v in multimodal_fields.items():
            if isinstance(v, torch.Tensor):
                generate_inputs[k] = v
            elif isinstance(v, list) and v and isinstance(v[0], list):
                generate_inputs[k] = pad(
                    [torch.tensor(x) for x in v],
                    padding_value=0,
                    padding_side="left",
                    pad_to_multiple_of=self.pad_to_multiple_of,
                )
            else:
                generate_inputs[k] = torch.tensor(np.array(v))
        if self._is_vlm and self.tools and has_tool_images:
            mm_ids = torch.zeros_like(padded_ids)
            if self._image_pad_token_id is not None:
                mm_ids[padded_ids == self._image_pad_token_id] = 1
            if self._video_pad_token_id is not None:
                mm_ids[padded_ids == self._video_pad_token_id] = 2
            if "image_grid_thw" in generate_inputs:
                generate_inputs["mm_token_type_ids"] = mm_ids
            else:
                generate_inputs["token_type_ids"] = mm_ids
        generate_inputs = super()._prepare_inputs(generate_inputs)
        with (
            profiling_context(self, "transformers.generate"),
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                generation_kwargs=self.generation_kwargs,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as unwrapped_model,
            torch.no_grad(),
            self._dist.summon_full_params(self.model_wrapped, recurse=False),
        ):
            prompt_completion_ids = unwrapped_model.generate(
                **generate_inputs, generation_config=self.generation_config
            )
        prompt_length = generate_inputs["input_ids"].size(1)
        completion_ids = prompt_completion_ids[:, prompt_length:]
        is_eos = torch.isin(completion_ids, torch.tensor(self.eos_token_ids, device=device))
        eos_idx = torch.full((is_eos.size(0),), is_eos.size(1), dtype=torch.long, device=device)
        eos_idx[is_eos.any(dim=1)] = is_eos.int().argmax(dim=1)[is_eos.any(dim=1)]
        sequence_indices = torch.arange(is_eos.size(1), device=device).expand(is_eos.size(0), -1)
        completion_mask = (sequence_indices <= eos_idx.unsqueeze(1)).int()
        completion_ids = [
            c[m].tolist() for c, m in zip(completion_ids.cpu(), completion_mask.bool().cpu(), strict=True)
        ]
        logprobs = None
    return (completion_ids, logprobs)
