# An excerpt of trl 1.16.0, trl.generation.vllm_generation: copyright The HuggingFace Team, licensed
# under the Apache License, Version 2.0. Changed: no comments, no docstrings, another layout.

def generate(
    self,
    prompts: list[list[int]],
    images: list[list | None] | None,
    num_generations: int,
    profiler: ProfilingContext | None = None,
) -> tuple:
    profiler = profiler or nullcontext()
    accelerator = self.accelerator
    temperature = self.temperature
    top_p = self.top_p
    top_k = self.top_k
    min_p = self.min_p
    repetition_penalty = self.repetition_penalty
    max_completion_length = self.max_completion_length
    if self.mode == "colocate" and self.enable_sleep_mode and self._llm_weights_sleeping:
        self.sync_weights()
    if self.mode == "server":
        all_prompts = gather_object(prompts)
        all_images = gather_object(images if images is not None else [None] * len(prompts))
        if all((img is None for img in all_images)):
            all_images = None
        if accelerator.is_main_process:
            ordered_set_of_prompt_ids = all_prompts[::num_generations]
            features = None
            if all_images is not None:
                features = self.vllm_client.image_features(all_images[::num_generations])
                features = [
                    self._place_features(prompt_features, prompt_ids)
                    for prompt_features, prompt_ids in zip(features, ordered_set_of_prompt_ids, strict=True)
                ]
            sampling_params = {
                "n": num_generations,
                "repetition_penalty": repetition_penalty,
                "temperature": temperature,
                "top_p": top_p,
                "top_k": top_k,
                "min_p": 0.0 if min_p is None else min_p,
                "max_tokens": max_completion_length,
                "logprobs": self.logprobs,
                "structured_outputs_regex": self.structured_outputs_regex,
                "generation_kwargs": self.generation_kwargs,
            }
            with profiler:
                output = self.vllm_client.generate(
                    prompts=ordered_set_of_prompt_ids, features=features, **sampling_params
                )
                payload = (
                    output["prompt_ids"],
                    output["completion_ids"],
                    output["logprobs"],
                    output.get("logprob_token_ids"),
                )
        else:
            payload = None
        obj_list = [payload]
        broadcast_object_list(obj_list, from_process=0)
        all_prompt_ids, all_completion_ids, all_logprobs, all_logprob_token_ids = obj_list[0]
        all_prompt_ids = [ids for ids in all_prompt_ids for _ in range(num_generations)]
        process_slice = slice(accelerator.process_index * len(prompts), (accelerator.process_index + 1) * len(prompts))
        prompt_ids = all_prompt_ids[process_slice]
        completion_ids = all_completion_ids[process_slice]
        logprobs = all_logprobs[process_slice] if all_logprobs is not None else None
        logprob_token_ids = all_logprob_token_ids[process_slice] if all_logprob_token_ids is not None else None
    elif self.mode == "colocate":
        generation_kwargs = {
            "n": 1,
            "repetition_penalty": repetition_penalty,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": 0.0 if min_p is None else min_p,
            "max_tokens": max_completion_length,
            "logprobs": self.logprobs,
        }
        generation_kwargs.update(self.generation_kwargs)
        if self.structured_outputs_regex is not None:
            if generation_kwargs.get("structured_outputs") is not None:
                logger.warning(
                    "Both `structured_outputs_regex` and `generation_kwargs['structured_outputs']` are set; `structured_outputs_regex` takes precedence."
                )
            generation_kwargs["structured_outputs"] = StructuredOutputsParams(regex=self.structured_outputs_regex)
        elif isinstance((structured_outputs_kwargs := generation_kwargs.get("structured_outputs")), dict):
            generation_kwargs["structured_outputs"] = StructuredOutputsParams(**structured_outputs_kwargs)
        sampling_params = SamplingParams(**generation_kwargs)
        if self.tensor_parallel_size > 1:
            orig_size = len(prompts)
            gathered_prompts = [None for _ in range(self.tensor_parallel_size)]
            torch.distributed.all_gather_object(gathered_prompts, prompts, group=self.tp_group)
            all_prompts = [p for sublist in gathered_prompts for p in sublist]
            local_images = images if images is not None else [None] * len(prompts)
            gathered_images = [None for _ in range(self.tensor_parallel_size)]
            torch.distributed.all_gather_object(gathered_images, local_images, group=self.tp_group)
            all_images = [img for sublist in gathered_images for img in sublist]
            if all((img is None for img in all_images)):
                all_images = None
        else:
            all_prompts = prompts
            all_images = images
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["kv_cache"])
        vllm_prompts = []
        if all_images is not None:
            for ids, img_list in zip(all_prompts, all_images, strict=True):
                row = {"prompt_token_ids": ids}
                if img_list is not None:
                    row["multi_modal_data"] = {"image": img_list if len(img_list) > 1 else img_list[0]}
                vllm_prompts.append(row)
        else:
            vllm_prompts = [{"prompt_token_ids": ids} for ids in all_prompts]
        if is_peft_model(self.model) and self.tensor_parallel_size > 1:
            torch.distributed.barrier(device_ids=[accelerator.local_process_index])
        with profiler:
            all_outputs = self.llm.generate(vllm_prompts, sampling_params=sampling_params, use_tqdm=False)
        all_prompt_ids = [output.prompt_token_ids for output in all_outputs]
        all_completion_ids = [output.token_ids for outputs in all_outputs for output in outputs.outputs]
        all_logprobs, all_logprob_token_ids = extract_logprobs(all_outputs)
        if self.tensor_parallel_size > 1:
            local_rank_in_group = torch.distributed.get_rank(group=self.tp_group)
            tp_slice = slice(local_rank_in_group * orig_size, (local_rank_in_group + 1) * orig_size)
            prompt_ids = all_prompt_ids[tp_slice]
            completion_ids = all_completion_ids[tp_slice]
            logprobs = all_logprobs[tp_slice] if all_logprobs is not None else None
            logprob_token_ids = all_logprob_token_ids[tp_slice] if all_logprob_token_ids is not None else None
        else:
            prompt_ids = all_prompt_ids
            completion_ids = all_completion_ids
            logprobs = all_logprobs
            logprob_token_ids = all_logprob_token_ids
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
            self._llm_weights_sleeping = True
    return (prompt_ids, completion_ids, logprobs, logprob_token_ids)
