# An excerpt of trl 1.16.0, trl.trainer.grpo_trainer: copyright The HuggingFace Team, licensed
# under the Apache License, Version 2.0. Changed: no comments, no docstrings, another layout.

def _generate(self, prompts: list):
    device = self.accelerator.device
    mode = "train" if self.model.training else "eval"
    prompts = copy.deepcopy(prompts)
    if self.rollout_func is not None:
        if self.use_vllm and self.state.global_step != self._last_loaded_step:
            with profiling_context(self, "sync_weights"):
                self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step
        output = self.rollout_func(prompts, self)
        required_keys = {"prompt_ids", "completion_ids", "logprobs"}
        missing_keys = required_keys - output.keys()
        if missing_keys:
            missing_keys_list = sorted(missing_keys)
            raise ValueError(f"rollout_func must return keys {missing_keys_list} in its output dict.")
        extra_fields = {k: v for k, v in output.items() if k not in required_keys}
        prompt_ids, completion_ids, logprobs = (output["prompt_ids"], output["completion_ids"], output["logprobs"])
        images = None
        multimodal_fields = {}
    else:
        prompt_ids, images, multimodal_fields = self._tokenize_prompts(prompts)
        num_generations = self.num_generations if mode == "train" else self.num_generations_eval
        completion_ids, logprobs = self._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations)
        extra_fields = {}
    if is_conversational({"prompt": prompts[0]}):
        if Version(transformers.__version__) >= Version("5.0.0") and (
            getattr(self._tokenizer, "response_template", None) is not None
            or getattr(self._tokenizer, "response_schema", None) is not None
        ):
            if self.environment_factories is not None:
                per_prompt_tools = [self._env_tools[name] for name in self._batch_environments]
            else:
                per_prompt_tools = [self.tools] * len(prompts)
            completions = [
                [parse_response(self._tokenizer, ids, prefix=prompt_ids[i], tools=per_prompt_tools[i])]
                for i, ids in enumerate(completion_ids)
            ]
        else:
            contents = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
            completions = [[{"role": "assistant", "content": content}] for content in contents]
    else:
        completions = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
    tool_images = []
    if self.tools:
        tool_mask, completions, completion_ids, logprobs, tool_call_count, tool_failure_count, tool_images = (
            self._tool_call_loop(prompts, prompt_ids, completion_ids, completions, logprobs, images, multimodal_fields)
        )
        if any((imgs for imgs in tool_images)):
            if images is None:
                images = [imgs if imgs else None for imgs in tool_images]
            else:
                images = [(existing or []) + new for existing, new in zip(images, tool_images, strict=True)]
    else:
        tool_mask = extra_fields.pop("env_mask", None)
    prompt_lengths = torch.tensor([len(ids) for ids in prompt_ids], device=device)
    if tool_mask is not None:
        completion_lengths = torch.tensor([sum(mask) for mask in tool_mask], device=device)
    else:
        completion_lengths = torch.tensor([len(ids) for ids in completion_ids], device=device)
    agg_prompt_lengths = self.accelerator.gather(prompt_lengths)
    agg_completion_lengths = self.accelerator.gather(completion_lengths)
    if agg_completion_lengths.numel() == 0:
        raise RuntimeError(
            "No completions were generated. This usually means the generation backend failed to return any results; see the generation logs above for the underlying error."
        )
    total_prompt_tokens = agg_prompt_lengths.sum()
    if mode == "train":
        self.state.num_input_tokens_seen += (total_prompt_tokens + agg_completion_lengths.sum()).item()
    self._metrics[mode]["num_tokens"] = [self.state.num_input_tokens_seen]
    self._metrics[mode]["completions/mean_length"].append(agg_completion_lengths.float().mean().item())
    self._metrics[mode]["completions/min_length"].append(agg_completion_lengths.float().min().item())
    self._metrics[mode]["completions/max_length"].append(agg_completion_lengths.float().max().item())
    eos_and_pad = [*self.eos_token_ids, self._tokenizer.pad_token_id]
    is_truncated = torch.tensor([ids[-1] not in eos_and_pad for ids in completion_ids], device=device)
    agg_is_truncated = self.accelerator.gather(is_truncated)
    self._metrics[mode]["completions/clipped_ratio"].append(agg_is_truncated.float().mean().item())
    term_completion_lengths = agg_completion_lengths[~agg_is_truncated]
    if len(term_completion_lengths) == 0:
        term_completion_lengths = torch.zeros(1, device=device)
    self._metrics[mode]["completions/mean_terminated_length"].append(term_completion_lengths.float().mean().item())
    self._metrics[mode]["completions/min_terminated_length"].append(term_completion_lengths.float().min().item())
    self._metrics[mode]["completions/max_terminated_length"].append(term_completion_lengths.float().max().item())
    if self.tools:
        agg_tool_call_count = self.accelerator.gather(torch.tensor(tool_call_count, device=device)).sum()
        tool_call_frequency = (agg_tool_call_count / len(agg_prompt_lengths)).item()
        self._metrics[mode]["tools/call_frequency"].append(tool_call_frequency)
        agg_tool_failure_count = self.accelerator.gather(torch.tensor(tool_failure_count, device=device)).sum()
        failure_frequency = (agg_tool_failure_count / agg_tool_call_count).item() if agg_tool_call_count > 0 else 0.0
        self._metrics[mode]["tools/failure_frequency"].append(failure_frequency)
    return (prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, tool_images)
