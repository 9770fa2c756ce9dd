# An excerpt of trl 1.16.0, trl.trainer.grpo_trainer: copyright The HuggingFace Team, licensed
# under the Apache License, Version 2.0. Changed: no comments, no docstrings, another layout.

def _get_tool_suffix_ids(self, tool_messages):
    dummy_tool_calls = [{"type": "function", "function": {"name": tool_messages[0]["name"], "arguments": {}}}]
    dummy_messages = [
        {"role": "user", "content": "dummy"},
        {"role": "assistant", "content": "", "tool_calls": dummy_tool_calls},
    ]
    if self._is_vlm:
        dummy_messages = prepare_multimodal_messages(dummy_messages)
        tool_messages = prepare_multimodal_messages(tool_messages)
    prefix_ids = self.processing_class.apply_chat_template(
        dummy_messages,
        add_generation_prompt=False,
        tokenize=True,
        chat_template=self.chat_template,
        return_dict=False,
        **self.chat_template_kwargs,
    )
    full_ids = self.processing_class.apply_chat_template(
        dummy_messages + tool_messages,
        add_generation_prompt=True,
        tokenize=True,
        chat_template=self.chat_template,
        return_dict=False,
        **self.chat_template_kwargs,
    )
    if self._is_vlm:
        prefix_ids = prefix_ids[0]
        full_ids = full_ids[0]
    eos_positions = [i for i, tok_id in enumerate(prefix_ids) if tok_id == self._tokenizer.eos_token_id]
    if eos_positions:
        prefix_ids = prefix_ids[: eos_positions[-1] + 1]
    if full_ids[: len(prefix_ids)] != prefix_ids:
        raise ValueError("Unexpected tokenization: the EOS-trimmed prefix IDs are not a prefix of the full IDs.")
    return full_ids[len(prefix_ids) :]
