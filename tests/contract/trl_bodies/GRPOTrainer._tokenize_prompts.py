# An excerpt of trl 1.16.0, trl.trainer.grpo_trainer: copyright The HuggingFace Team, licensed
# under the Apache License, Version 2.0. Changed: no comments, no docstrings, another layout.

def _tokenize_prompts(self, prompts: list):
    if is_conversational({"prompt": prompts[0]}):
        if self._is_vlm:
            prompts = [prepare_multimodal_messages(prompt) for prompt in prompts]
        images = []
        has_images = False
        for prompt in prompts:
            prompt_images = []
            for message in prompt:
                if isinstance(message["content"], list):
                    for part in message["content"]:
                        if part["type"] == "image":
                            prompt_images.append(part["image"])
                            has_images = True
            images.append(prompt_images if prompt_images else None)
        images = images if has_images else None
        if self.environment_factories is not None:
            prompt_ids = []
            multimodal_fields = {}
            for prompt, name in zip(prompts, self._batch_environments, strict=True):
                tokenized = self.processing_class.apply_chat_template(
                    conversation=[prompt],
                    tools=self._env_tools[name] or None,
                    chat_template=self.chat_template,
                    add_generation_prompt=True,
                    tokenize=True,
                    return_dict=True,
                    **self.chat_template_kwargs,
                )
                prompt_ids.append(tokenized["input_ids"][0])
                for k, v in tokenized.items():
                    if k not in ("input_ids", "attention_mask"):
                        multimodal_fields.setdefault(k, []).append(v)
            multimodal_fields = {
                k: torch.cat(v) if isinstance(v[0], torch.Tensor) else [row for prompt_v in v for row in prompt_v]
                for k, v in multimodal_fields.items()
            }
            return (prompt_ids, images, multimodal_fields)
        needs_padding_workaround = Version("5.3.0") <= Version(transformers.__version__) < Version("5.4.0")
        tokenized = self.processing_class.apply_chat_template(
            conversation=prompts,
            tools=self.tools or None,
            chat_template=self.chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **{"padding": True} if needs_padding_workaround else {},
            **self.chat_template_kwargs,
        )
        if needs_padding_workaround:
            prompt_ids = [
                [tok for tok, m in zip(ids, mask, strict=True) if m]
                for ids, mask in zip(tokenized["input_ids"], tokenized["attention_mask"], strict=True)
            ]
        else:
            prompt_ids = tokenized["input_ids"]
        multimodal_fields = {k: v for k, v in tokenized.items() if k not in ("input_ids", "attention_mask")}
    else:
        prompt_ids = self.processing_class(text=prompts)["input_ids"]
        images = None
        multimodal_fields = {}
    return (prompt_ids, images, multimodal_fields)
