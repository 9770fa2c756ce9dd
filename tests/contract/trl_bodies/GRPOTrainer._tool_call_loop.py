# An excerpt of trl 1.16.0, trl.trainer.grpo_trainer: copyright The HuggingFace Team, licensed
# under the Apache License, Version 2.0. Changed: no comments, no docstrings, another layout.

def _tool_call_loop(self, prompts, prompt_ids, completion_ids, completions, logprobs, images, multimodal_fields):
    tool_calls = [completion[0].get("tool_calls") for completion in completions]
    idxs_with_tool = [idx for idx, tool_call in enumerate(tool_calls) if tool_call]
    tool_calls = [tool_calls[idx] for idx in idxs_with_tool]
    tool_mask = [[1] * len(ids) for ids in completion_ids]
    tool_images = [[] for _ in completion_ids]
    tool_call_count = 0
    tool_failure_count = 0
    iteration_num = 0
    while idxs_with_tool and iteration_num < self.max_tool_calling_iterations:
        prompt_completion_tools = [prompts[i] for i in idxs_with_tool]
        completions_len_before = [len(completions[i]) for i in idxs_with_tool]
        tool_images_len_before = [len(tool_images[i]) for i in idxs_with_tool]
        prompts_len_before = [len(prompts[i]) for i in idxs_with_tool]
        for idx in range(len(idxs_with_tool)):
            idx_with_tool = idxs_with_tool[idx]
            tool_call_list = tool_calls[idx]
            prompt_completion_tool = prompt_completion_tools[idx]
            sync_tool_dict = self._sync_tool_dicts[idx_with_tool]
            async_tool_dict = self._async_tool_dicts[idx_with_tool]
            prompt_completion_tool.append(completions[idx_with_tool][-1])
            async_coros = []
            tool_call_results = []
            for tool_call in tool_call_list:
                tool_call_count += 1
                if tool_call["type"] == "function":
                    function = tool_call["function"]
                    name = function["name"]
                    try:
                        if name in sync_tool_dict:
                            tool_call_results.append((name, sync_tool_dict[name](**function["arguments"])))
                        elif name in async_tool_dict:
                            async_coros.append((name, async_tool_dict[name](**function["arguments"])))
                        else:
                            raise ValueError(f"Tool {name} not found.")
                    except Exception as e:
                        tool_failure_count += 1
                        result = {"error": str(e)}
                        tool_call_results.append((name, result))
                else:
                    tool_failure_count += 1
                    name = tool_call.get("name", "unknown")
                    tool_call_results.append((name, {"error": f"Unsupported tool call type: {tool_call['type']}"}))
            if async_coros:

                async def _run_async_tools(async_coros):
                    coros = [coro for _, coro in async_coros]
                    results = await asyncio.gather(*coros, return_exceptions=True)
                    return [(name, result) for (name, _), result in zip(async_coros, results, strict=False)]

                async_results = asyncio.run_coroutine_threadsafe(
                    _run_async_tools(async_coros), self.async_loop
                ).result()
                for name, result in async_results:
                    if isinstance(result, Exception):
                        tool_failure_count += 1
                        tool_call_results.append((name, {"error": str(result)}))
                    else:
                        tool_call_results.append((name, result))
            for name, result in tool_call_results:
                content = result if isinstance(result, list) else str(result)
                tool_message = {"role": "tool", "name": name, "content": content}
                if isinstance(content, list):
                    for part in content:
                        if isinstance(part, dict) and part.get("type") == "image":
                            tool_images[idx_with_tool].append(part["image"])
                prompt_completion_tool.append(tool_message)
                completions[idx_with_tool].append(tool_message)
        prompt_completion_tool_ids = []
        for idx in range(len(idxs_with_tool)):
            idx_with_tool = idxs_with_tool[idx]
            tool_messages = []
            for message in reversed(completions[idx_with_tool]):
                if message["role"] == "tool":
                    tool_messages.insert(0, message)
                else:
                    break
            suffix_ids = self._get_tool_suffix_ids(tool_messages)
            prompt_completion_tool_ids.append(prompt_ids[idx_with_tool] + completion_ids[idx_with_tool] + suffix_ids)
        if self.use_vllm and self.vllm_mode == "colocate":
            max_model_len = self.vllm_generation.llm.llm_engine.model_config.max_model_len
        else:
            config = self.model.config.text_config if self._is_vlm else self.model.config
            max_model_len = config.max_position_embeddings
        overlong = [
            len(pct) - len(prompt_ids[i]) > self.max_completion_length or len(pct) >= max_model_len
            for i, pct in zip(idxs_with_tool, prompt_completion_tool_ids, strict=True)
        ]
        for idx in range(len(idxs_with_tool)):
            if overlong[idx]:
                idx_with_tool = idxs_with_tool[idx]
                del completions[idx_with_tool][completions_len_before[idx] :]
                del tool_images[idx_with_tool][tool_images_len_before[idx] :]
                del prompts[idx_with_tool][prompts_len_before[idx] :]
        idxs_with_tool = [idx for idx, o in zip(idxs_with_tool, overlong, strict=True) if not o]
        prompt_completion_tool_ids = [
            pct for pct, o in zip(prompt_completion_tool_ids, overlong, strict=True) if not o
        ]
        if not idxs_with_tool:
            break
        merged_images = images
        if any((imgs for imgs in tool_images)):
            if merged_images is None:
                merged_images = [imgs if imgs else None for imgs in tool_images]
            else:
                merged_images = [
                    (existing or []) + new for existing, new in zip(merged_images, tool_images, strict=True)
                ]
        loop_images = [merged_images[i] for i in idxs_with_tool] if merged_images else None
        if self._is_vlm and self.tools and any((imgs for imgs in tool_images)):
            flat_loop_images = [img for img_list in loop_images if img_list for img in img_list]
            if flat_loop_images:
                image_inputs = self.processing_class.image_processor(images=flat_loop_images, return_tensors="pt")
                image_inputs = super()._prepare_inputs(image_inputs)
                loop_multimodal_fields = dict(image_inputs)
            else:
                loop_multimodal_fields = {}
        elif multimodal_fields:
            if "num_images" not in multimodal_fields and images is not None:
                multimodal_fields = {
                    **multimodal_fields,
                    "num_images": [len(img_list) if img_list else 0 for img_list in images],
                }
            split_fields = split_pixel_values_by_grid(multimodal_fields)
            loop_multimodal_fields = {}
            for k, v in split_fields.items():
                selected = [v[i] for i in idxs_with_tool]
                if k in ("token_type_ids", "mm_token_type_ids") and isinstance(selected[0], torch.Tensor):
                    selected = [s.tolist() for s in selected]
                if isinstance(selected[0], list):
                    selected = [
                        s + [0] * (len(pct) - len(s))
                        for s, pct in zip(selected, prompt_completion_tool_ids, strict=True)
                    ]
                elif isinstance(v, torch.Tensor):
                    selected = torch.stack(selected)
                loop_multimodal_fields[k] = selected
            loop_multimodal_fields = unsplit_pixel_values_by_grid(loop_multimodal_fields)
            loop_multimodal_fields.pop("num_images", None)
            if "pixel_values" in loop_multimodal_fields and loop_multimodal_fields["pixel_values"].numel() == 0:
                for key in ["pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"]:
                    loop_multimodal_fields.pop(key, None)
        else:
            loop_multimodal_fields = {}
        post_tool_ids, post_tool_logprobs = self._generate_single_turn(
            prompt_completion_tool_ids,
            loop_images,
            loop_multimodal_fields,
            num_generations=1,
            has_tool_images=any((imgs for imgs in tool_images)),
        )
        for idx in range(len(idxs_with_tool)):
            idx_with_tool = idxs_with_tool[idx]
            completion_tool_length = len(prompt_completion_tool_ids[idx]) - len(prompt_ids[idx_with_tool])
            excess_length = completion_tool_length + len(post_tool_ids[idx]) - self.max_completion_length
            if excess_length > 0:
                new_len = len(post_tool_ids[idx]) - excess_length
                post_tool_ids[idx] = post_tool_ids[idx][:new_len]
                if logprobs is not None:
                    post_tool_logprobs[idx] = post_tool_logprobs[idx][:new_len]
        for idx in range(len(idxs_with_tool)):
            idx_with_tool = idxs_with_tool[idx]
            prompt_completion_tool_length = len(prompt_completion_tool_ids[idx])
            prompt_length = len(prompt_ids[idx_with_tool])
            completion_length = len(completion_ids[idx_with_tool])
            post_tool_length = len(post_tool_ids[idx])
            tool_length = prompt_completion_tool_length - prompt_length - completion_length
            tool_mask[idx_with_tool] += [0] * tool_length + [1] * post_tool_length
            if logprobs is not None:
                logprobs[idx_with_tool] += [0.0] * tool_length + post_tool_logprobs[idx]
        for idx in range(len(idxs_with_tool)):
            idx_with_tool = idxs_with_tool[idx]
            prompt_length = len(prompt_ids[idx_with_tool])
            pct = prompt_completion_tool_ids[idx]
            completion_ids[idx_with_tool] = pct[prompt_length:] + post_tool_ids[idx]
        if self.environment_factories is not None:
            per_prompt_tools = [self._env_tools[self._batch_environments[i]] for i in idxs_with_tool]
        else:
            per_prompt_tools = [self.tools] * len(idxs_with_tool)
        post_tool_completions = [
            parse_response(self._tokenizer, ids, prefix=prompt_completion_tool_ids[idx], tools=per_prompt_tools[idx])
            if ids
            else {}
            for idx, ids in enumerate(post_tool_ids)
        ]
        for idx in range(len(idxs_with_tool)):
            idx_with_tool = idxs_with_tool[idx]
            if post_tool_completions[idx]:
                completions[idx_with_tool].append(post_tool_completions[idx])
        tool_calls = [completion.get("tool_calls") for completion in post_tool_completions]
        idxs_with_tool = [idx for idx, tool_call in zip(idxs_with_tool, tool_calls, strict=True) if tool_call]
        tool_calls = [tool_call for tool_call in tool_calls if tool_call]
        iteration_num += 1
    return (tool_mask, completions, completion_ids, logprobs, tool_call_count, tool_failure_count, tool_images)
