# An excerpt of trl 1.16.0, trl.trainer.grpo_trainer: copyright The HuggingFace Team, licensed
# under the Apache License, Version 2.0. Changed: no comments, no docstrings, another layout.

def _generate_and_score_completions(
    self, inputs: list[dict[str, torch.Tensor | Any]]
) -> dict[str, torch.Tensor | Any]:
    device = self.accelerator.device
    mode = "train" if self.model.training else "eval"
    if self.environment_factories is not None:
        prompts = [x.get("prompt", [{"role": "user", "content": ""}]) for x in inputs]
    else:
        prompts = [x["prompt"] for x in inputs]
    if self.environment_factories is not None:
        self._batch_environments = [x.get("environment") if self._multi_environment else None for x in inputs]
        if self._multi_environment:
            for name in set(self._batch_environments):
                if name not in self.environment_factories:
                    raise ValueError(
                        f"Example has `environment={name!r}`, which is not among the environments passed to `environment_factory`. Expected one of: {list(self.environment_factories)}."
                    )
        self.environments = []
        pool_cursor = {}
        for name in self._batch_environments:
            pool = self._environment_pool[name]
            index = pool_cursor.get(name, 0)
            if index == len(pool):
                pool.append(self.environment_factories[name]())
            pool_cursor[name] = index + 1
            self.environments.append(pool[index])
    if self.tools:
        self._sync_tool_dicts = []
        self._async_tool_dicts = []
        for i in range(len(inputs)):
            methods = []
            if self.environments:
                environment = self.environments[i]
                methods = [
                    getattr(environment, member_name)
                    for member_name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)
                    if member_name not in ("reset", "get_reward") and (not member_name.startswith("_"))
                ]
            sync_tool_dict, async_tool_dict = ({}, {})
            for tool in self._standalone_tools + methods:
                if inspect.iscoroutinefunction(tool):
                    async_tool_dict[tool.__name__] = tool
                else:
                    sync_tool_dict[tool.__name__] = tool
            self._sync_tool_dicts.append(sync_tool_dict)
            self._async_tool_dicts.append(async_tool_dict)
    if self.environments:
        for i, (prompt, environment, x) in enumerate(zip(prompts, self.environments, inputs, strict=True)):
            reset_kwargs = {k: v for k, v in x.items() if k != "environment"} if self._multi_environment else x
            observation = environment.reset(**reset_kwargs)
            if observation is None:
                continue
            content = prompt[-1]["content"]
            if isinstance(observation, list) and isinstance(content, str):
                content = [{"type": "text", "text": content}]
            if isinstance(observation, str) and isinstance(content, list):
                observation = [{"type": "text", "text": observation}]
            prompts[i] = prompt[:-1] + [{**prompt[-1], "content": content + observation}]
    if "images" in inputs[0]:
        images = [example.get("images") for example in inputs]
    elif "image" in inputs[0]:
        images = [[example.get("image")] if example.get("image") is not None else None for example in inputs]
    else:
        images = None
    if images is not None and all((img_list == [] for img_list in images)):
        images = None
    if images is not None:
        if not is_conversational(inputs[0]):
            raise ValueError(
                "Multimodal training requires conversational prompts. It looks like the dataset contains non-conversational inputs, likely because a chat template was applied before passing the dataset to the trainer. Please provide the raw conversational prompts and let the trainer apply the chat template internally."
            )
        prompts = [
            prepare_multimodal_messages(prompt, images=image_list)
            for prompt, image_list in zip(prompts, images, strict=True)
        ]
    dataset_images = images
    (
        prompt_ids_list,
        completion_ids_list,
        tool_mask_list,
        completions,
        sampling_per_token_logps_list,
        extra_fields,
        images,
        tool_images,
    ) = self._generate(prompts)
    if images is None:
        images = dataset_images
    prompt_ids = [torch.tensor(ids) for ids in prompt_ids_list]
    prompt_mask = [torch.ones_like(ids, dtype=torch.long) for ids in prompt_ids]
    prompt_ids = pad(
        prompt_ids,
        padding_value=self._tokenizer.pad_token_id,
        padding_side="left",
        pad_to_multiple_of=self.pad_to_multiple_of,
    ).to(device=device)
    prompt_mask = pad(
        prompt_mask, padding_value=0, padding_side="left", pad_to_multiple_of=self.pad_to_multiple_of
    ).to(device=device)
    completion_ids = [torch.tensor(ids) for ids in completion_ids_list]
    completion_mask = [torch.ones_like(ids, dtype=torch.long) for ids in completion_ids]
    completion_ids = pad(
        completion_ids,
        padding_value=self._tokenizer.pad_token_id,
        padding_side="right",
        pad_to_multiple_of=self.pad_to_multiple_of,
    ).to(device=device)
    completion_mask = pad(
        completion_mask, padding_value=0, padding_side="right", pad_to_multiple_of=self.pad_to_multiple_of
    ).to(device=device)
    if sampling_per_token_logps_list is not None:
        sampling_per_token_logps = [
            torch.tensor([float("nan") if x is None else x for x in logps]) for logps in sampling_per_token_logps_list
        ]
        sampling_per_token_logps = pad(
            sampling_per_token_logps,
            padding_value=0.0,
            padding_side="right",
            pad_to_multiple_of=self.pad_to_multiple_of,
        ).to(device=device)
    else:
        sampling_per_token_logps = None
    if tool_mask_list is not None:
        tool_mask = [torch.tensor(mask) for mask in tool_mask_list]
        tool_mask = pad(
            tool_mask, padding_value=1, padding_side="right", pad_to_multiple_of=self.pad_to_multiple_of
        ).to(device=device)
    else:
        tool_mask = None
    if self.mask_truncated_completions:
        eos_and_pad = [*self.eos_token_ids, self._tokenizer.pad_token_id]
        is_truncated = torch.tensor([ids[-1] not in eos_and_pad for ids in completion_ids_list], device=device)
        completion_mask = completion_mask * (~is_truncated).unsqueeze(1).int()
        if tool_mask is not None:
            tool_mask = tool_mask * (~is_truncated).unsqueeze(1).int()
    loss_mask = completion_mask if tool_mask is None else completion_mask * tool_mask
    num_items_in_batch = self.accelerator.gather(loss_mask.sum()).sum()
    prompt_completion_ids = torch.cat([prompt_ids, completion_ids], dim=1)
    attention_mask = torch.cat([prompt_mask, completion_mask], dim=1)
    logits_to_keep = completion_ids.size(1)
    batch_size = self.args.per_device_train_batch_size if mode == "train" else self.args.per_device_eval_batch_size
    num_images = [len(img_list) if img_list else 0 for img_list in images] if images is not None else None
    if self.tools and any((imgs for imgs in tool_images)) and self._is_vlm:
        flat_images = [img for img_list in images if img_list for img in img_list]
        image_inputs = self.processing_class.image_processor(images=flat_images, return_tensors="pt")
        image_inputs = super()._prepare_inputs(image_inputs)
        forward_kwargs = dict(image_inputs)
    elif images is not None:
        if self.environment_factories is not None:
            per_prompt_tools = [self._env_tools[name] for name in self._batch_environments]
        else:
            per_prompt_tools = [self.tools] * len(prompts)
        prompts_text = [
            apply_chat_template({"prompt": prompt}, self.processing_class, tools=tools, **self.chat_template_kwargs)[
                "prompt"
            ]
            for prompt, tools in zip(prompts, per_prompt_tools, strict=True)
        ]
        prompt_inputs = self.processing_class(images=images, text=prompts_text, padding=True, return_tensors="pt")
        prompt_inputs = super()._prepare_inputs(prompt_inputs)
        forward_kwargs = {k: v for k, v in prompt_inputs.items() if k not in ["input_ids", "attention_mask"]}
    else:
        forward_kwargs = {}
    num_tiles = None
    if images is not None and "spatial_shapes" in forward_kwargs:
        image_info = self.processing_class.image_processor(
            images=images, return_tensors="pt", return_row_col_info=True
        )
        tiles_per_image = image_info["image_rows"] * image_info["image_cols"]
        if self.processing_class.image_processor.use_thumbnail:
            tiles_per_image = tiles_per_image + (tiles_per_image > 1).to(tiles_per_image.dtype)
        num_tiles = [group.sum().item() for group in torch.split(tiles_per_image, num_images)]
    elif (
        images is not None
        and forward_kwargs["pixel_values"].ndim == 4
        and (forward_kwargs["pixel_values"].size(0) != sum(num_images))
    ):
        num_patches = self.processing_class.image_processor(images=images, crop_to_patches=True, return_tensors="pt")[
            "num_patches"
        ]
        num_tiles = [group.sum().item() for group in torch.split(num_patches, num_images)]
    if "token_type_ids" in forward_kwargs:
        token_type_ids = forward_kwargs["token_type_ids"]
        if self.pad_to_multiple_of is not None:
            padding_size = prompt_ids.size(1) - token_type_ids.size(1)
            if padding_size > 0:
                token_type_ids = torch.cat(
                    [token_type_ids.new_zeros((token_type_ids.size(0), padding_size)), token_type_ids], dim=1
                )
        forward_kwargs["token_type_ids"] = torch.cat(
            [token_type_ids, token_type_ids.new_zeros(completion_ids.shape)], dim=1
        )
    if "mm_token_type_ids" in forward_kwargs:
        mm_token_type_ids = forward_kwargs["mm_token_type_ids"]
        if self.pad_to_multiple_of is not None:
            padding_size = prompt_ids.size(1) - mm_token_type_ids.size(1)
            if padding_size > 0:
                mm_token_type_ids = torch.cat(
                    [mm_token_type_ids.new_zeros((mm_token_type_ids.size(0), padding_size)), mm_token_type_ids], dim=1
                )
        forward_kwargs["mm_token_type_ids"] = torch.cat(
            [mm_token_type_ids, mm_token_type_ids.new_zeros(completion_ids.shape)], dim=1
        )
    if self.tools and any((imgs for imgs in tool_images)) and self._is_vlm:
        mm_ids = torch.zeros_like(prompt_completion_ids)
        if self._image_pad_token_id is not None:
            mm_ids[prompt_completion_ids == self._image_pad_token_id] = 1
        if self._video_pad_token_id is not None:
            mm_ids[prompt_completion_ids == self._video_pad_token_id] = 2
        image_grid_thw = forward_kwargs.get("image_grid_thw")
        if image_grid_thw is not None:
            forward_kwargs["mm_token_type_ids"] = mm_ids
        else:
            forward_kwargs["token_type_ids"] = mm_ids
        if image_grid_thw is not None and num_images is not None:
            merge_length = getattr(self.processing_class.image_processor, "merge_size", 2) ** 2
            img_offset = 0
            has_mismatch = False
            for b in range(mm_ids.shape[0]):
                sample_tokens = (mm_ids[b] == 1).sum().item()
                sample_features = 0
                for i in range(num_images[b]):
                    grid_idx = img_offset + i
                    if grid_idx < image_grid_thw.shape[0]:
                        sample_features += image_grid_thw[grid_idx].prod().item() // merge_length
                if sample_tokens != sample_features:
                    has_mismatch = True
                    break
                img_offset += num_images[b]
            if has_mismatch:
                forward_kwargs.pop("pixel_values", None)
                forward_kwargs.pop("image_grid_thw", None)
                mm_ids.zero_()
                forward_kwargs["mm_token_type_ids"] = mm_ids
                num_images = None
    with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
        generate_every = self.args.steps_per_generation * self.num_iterations
        if self.args.gradient_accumulation_steps % generate_every != 0 or (
            self.use_vllm and self.vllm_importance_sampling_correction
        ):
            old_per_token_logps, _, _ = self._get_per_token_logps_and_entropies(
                self.model,
                prompt_completion_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size,
                num_images=num_images,
                num_tiles=num_tiles,
                **forward_kwargs,
            )
        else:
            old_per_token_logps = None
        if self.use_vllm and self.vllm_importance_sampling_correction:
            mask = completion_mask if tool_mask is None else completion_mask * tool_mask
            per_token_logps_diff = (old_per_token_logps - sampling_per_token_logps) * mask
            per_token_logps_diff = torch.nan_to_num(per_token_logps_diff, nan=0.0)
            sequence_level_is = self.vllm_importance_sampling_mode in ["sequence_mask", "sequence_truncate"]
            if sequence_level_is:
                per_sequence_logps_diff = per_token_logps_diff.sum(dim=-1, keepdim=True)
                logps_diff = per_sequence_logps_diff
            else:
                logps_diff = per_token_logps_diff
            vllm_importance_sampling_ratio = torch.exp(logps_diff)
            if self.vllm_importance_sampling_mode in ["sequence_truncate", "token_truncate"]:
                vllm_importance_sampling_ratio = torch.clamp(
                    vllm_importance_sampling_ratio,
                    min=self.vllm_importance_sampling_clip_min,
                    max=self.vllm_importance_sampling_clip_max,
                )
            elif self.vllm_importance_sampling_mode in ["sequence_mask", "token_mask"]:
                min_val = (
                    self.vllm_importance_sampling_clip_min
                    if self.vllm_importance_sampling_clip_min is not None
                    else -math.inf
                )
                max_val = (
                    self.vllm_importance_sampling_clip_max
                    if self.vllm_importance_sampling_clip_max is not None
                    else math.inf
                )
                invalid_mis_mask = (vllm_importance_sampling_ratio < min_val) | (
                    vllm_importance_sampling_ratio > max_val
                )
                vllm_importance_sampling_ratio = vllm_importance_sampling_ratio.masked_fill(
                    invalid_mis_mask, value=0.0
                )
            else:
                raise ValueError(
                    f"Unknown vLLM importance sampling level: {self.vllm_importance_sampling_mode}. Possible values are 'token_truncate', 'token_mask', 'sequence_truncate', and 'sequence_mask'."
                )
        if self.beta != 0.0:
            if self.ref_model is not None:
                ref_per_token_logps, _, _ = self._get_per_token_logps_and_entropies(
                    self.ref_model,
                    prompt_completion_ids,
                    attention_mask,
                    logits_to_keep,
                    batch_size=batch_size,
                    num_images=num_images,
                    num_tiles=num_tiles,
                    **forward_kwargs,
                )
            else:
                model = self.accelerator.unwrap_model(self.model)
                with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
                    ref_per_token_logps, _, _ = self._get_per_token_logps_and_entropies(
                        self.model,
                        prompt_completion_ids,
                        attention_mask,
                        logits_to_keep,
                        batch_size=batch_size,
                        num_images=num_images,
                        num_tiles=num_tiles,
                        **forward_kwargs,
                    )
        else:
            ref_per_token_logps = None
    if extra_fields:
        for i, inp in enumerate(inputs):
            for key, values in extra_fields.items():
                if isinstance(values, list) and i < len(values):
                    inp[key] = values[i]
                elif not isinstance(values, list):
                    inp[key] = values
    rewards_per_func = self._calculate_rewards(inputs, prompts, completions, completion_ids_list)
    num_generations = self.num_generations if mode == "train" else self.num_generations_eval
    unscorable_mask = torch.isnan(rewards_per_func).all(dim=1)
    if self.multi_objective_aggregation == "sum_then_normalize":
        rewards = (rewards_per_func * self.reward_weights.to(device).unsqueeze(0)).nansum(dim=1)
        rewards[unscorable_mask] = torch.nan
        mean_grouped_rewards = torch.nanmean(rewards.view(-1, num_generations), dim=1)
        mean_grouped_rewards = mean_grouped_rewards.repeat_interleave(num_generations, dim=0)
        if self.scale_rewards in ["group", "none"]:
            if num_generations > 1:
                std_rewards = nanstd(rewards.view(-1, num_generations), dim=1)
                std_rewards = std_rewards.repeat_interleave(num_generations, dim=0)
            else:
                std_rewards = torch.zeros_like(rewards)
        elif self.scale_rewards == "batch":
            if rewards.numel() > 1:
                std_rewards = nanstd(rewards).expand_as(rewards)
            else:
                std_rewards = torch.zeros_like(rewards)
        else:
            raise ValueError(
                f"Invalid value for scale_rewards: {self.scale_rewards}. Must be one of 'batch', 'group', or 'none'."
            )
        advantages = rewards - mean_grouped_rewards
        if self.scale_rewards != "none":
            advantages = advantages / (std_rewards + 0.0001)
        is_std_zero = torch.isclose(std_rewards, torch.zeros_like(std_rewards))
    elif self.multi_objective_aggregation == "normalize_then_sum":
        grouped = rewards_per_func.view(-1, num_generations, len(self.reward_funcs))
        mean_k = torch.nanmean(grouped, dim=1, keepdim=True)
        std_k = nanstd(grouped, dim=1, keepdim=True) if num_generations > 1 else torch.zeros_like(mean_k)
        reward_k = (grouped - mean_k) / (std_k + 0.0001)
        reward_k = reward_k.view(-1, len(self.reward_funcs))
        rewards = (reward_k * self.reward_weights.to(device).unsqueeze(0)).nansum(dim=1)
        rewards[unscorable_mask] = torch.nan
        std_rewards = nanstd(rewards).expand_as(rewards) if rewards.numel() > 1 else torch.zeros_like(rewards)
        advantages = (rewards - torch.nanmean(rewards)) / (std_rewards + 0.0001)
        is_std_zero = torch.isclose(std_rewards, torch.zeros_like(std_rewards))
    else:
        raise ValueError(
            f"Invalid multi_objective_aggregation: {self.multi_objective_aggregation}. Must be 'sum_then_normalize' or 'normalize_then_sum'."
        )
    advantages = torch.nan_to_num(advantages, nan=0.0)
    process_slice = slice(
        self.accelerator.process_index * len(prompts), (self.accelerator.process_index + 1) * len(prompts)
    )
    all_process_advantages = advantages.clone()
    advantages = advantages[process_slice]
    for i, reward_func_name in enumerate(self.reward_func_names):
        mean_rewards = torch.nanmean(rewards_per_func[:, i]).item()
        self._metrics[mode][f"rewards/{reward_func_name}/mean"].append(mean_rewards)
        std_func_rewards = nanstd(rewards_per_func[:, i]).item()
        self._metrics[mode][f"rewards/{reward_func_name}/std"].append(std_func_rewards)
    rewards = (rewards_per_func * self.reward_weights.to(rewards_per_func.device).unsqueeze(0)).nansum(dim=1)
    rewards[unscorable_mask] = torch.nan
    self._metrics[mode]["reward"].append(torch.nanmean(rewards).item())
    self._metrics[mode]["reward_std"].append(nanstd(rewards).item())
    self._metrics[mode]["frac_reward_zero_std"].append(is_std_zero.float().mean().item())
    self._logs["prompt"].extend(gather_object(prompts))
    self._logs["completion"].extend(gather_object(completions))
    for i, name in enumerate(self.reward_func_names):
        self._logs["rewards"][name].extend(rewards_per_func[:, i].tolist())
    self._logs["advantages"].extend(all_process_advantages.tolist())
    for column in sorted(set(gather_object(list(self._pending_extra_logs)))):
        values = self._pending_extra_logs.get(column, [None] * len(prompts))
        self._logs["extra"][column].extend(gather_object(values))
    self._pending_extra_logs.clear()
    for name in sorted(set(gather_object(list(self._pending_metrics)))):
        values = self._pending_metrics.get(name, [])
        local_stats = torch.tensor([sum(values), len(values)], dtype=torch.float32, device=device)
        total, count = self.accelerator.gather(local_stats).view(-1, 2).sum(dim=0).tolist()
        self._metrics[mode][name].append(total / count)
    self._pending_metrics.clear()
    if images is not None and self.log_multimodal:
        self._logs["images"].extend(gather_object(images))
    if self.use_vllm and self.vllm_importance_sampling_correction:
        delta = torch.abs(old_per_token_logps - sampling_per_token_logps)
        mask = completion_mask.bool() if tool_mask is None else (completion_mask * tool_mask).bool()
        delta = delta[mask & ~torch.isnan(delta)]
        mean_delta = torch.mean(delta) if delta.numel() > 0 else torch.tensor(0.0, device=device)
        max_delta = torch.max(delta) if delta.numel() > 0 else torch.tensor(0.0, device=device)
        self._metrics[mode]["sampling/sampling_logp_difference/mean"].append(
            self.accelerator.gather(mean_delta).mean().item()
        )
        self._metrics[mode]["sampling/sampling_logp_difference/max"].append(
            self.accelerator.gather(max_delta).max().item()
        )
        if sequence_level_is:
            flat_is_ratio = vllm_importance_sampling_ratio.flatten()
        else:
            flat_is_ratio = vllm_importance_sampling_ratio[mask]
        min_importance_sampling_ratio = (
            torch.min(flat_is_ratio) if flat_is_ratio.numel() > 0 else torch.tensor(0.0, device=device)
        )
        mean_importance_sampling_ratio = (
            torch.mean(flat_is_ratio) if flat_is_ratio.numel() > 0 else torch.tensor(0.0, device=device)
        )
        max_importance_sampling_ratio = (
            torch.max(flat_is_ratio) if flat_is_ratio.numel() > 0 else torch.tensor(0.0, device=device)
        )
        self._metrics[mode]["sampling/importance_sampling_ratio/min"].append(
            nanmin(self.accelerator.gather(min_importance_sampling_ratio)).item()
        )
        self._metrics[mode]["sampling/importance_sampling_ratio/mean"].append(
            self.accelerator.gather(mean_importance_sampling_ratio).nanmean().item()
        )
        self._metrics[mode]["sampling/importance_sampling_ratio/max"].append(
            nanmax(self.accelerator.gather(max_importance_sampling_ratio)).item()
        )
    output = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": advantages,
        "num_items_in_batch": num_items_in_batch,
    }
    if old_per_token_logps is not None:
        output["old_per_token_logps"] = old_per_token_logps
    if self.use_vllm and self.vllm_importance_sampling_correction:
        output["importance_sampling_ratio"] = vllm_importance_sampling_ratio
    if sampling_per_token_logps is not None:
        output["sampling_per_token_logps"] = sampling_per_token_logps
    if ref_per_token_logps is not None:
        output["ref_per_token_logps"] = ref_per_token_logps
    if "pixel_values" in forward_kwargs:
        output["pixel_values"] = forward_kwargs["pixel_values"]
    if "image_grid_thw" in forward_kwargs:
        output["image_grid_thw"] = forward_kwargs["image_grid_thw"]
    if "pixel_attention_mask" in forward_kwargs:
        output["pixel_attention_mask"] = forward_kwargs["pixel_attention_mask"]
    if "spatial_shapes" in forward_kwargs:
        output["spatial_shapes"] = forward_kwargs["spatial_shapes"]
    if "image_sizes" in forward_kwargs:
        output["image_sizes"] = forward_kwargs["image_sizes"]
    if "token_type_ids" in forward_kwargs:
        output["token_type_ids"] = forward_kwargs["token_type_ids"]
    if "mm_token_type_ids" in forward_kwargs:
        output["mm_token_type_ids"] = forward_kwargs["mm_token_type_ids"]
    if "image_position_ids" in forward_kwargs:
        output["image_position_ids"] = forward_kwargs["image_position_ids"]
    if images is not None:
        output["num_images"] = num_images
        if num_tiles is not None:
            output["num_tiles"] = num_tiles
    if tool_mask is not None:
        output["tool_mask"] = tool_mask
    return output
