"""Tool calls for ChatML models whose chat template shows none, in the format of Qwen2.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoProcessor, PreTrainedTokenizerBase
from trl.chat_template_utils import qwen3_template, supports_tool_calling

_START, _END = "<|im_start|>", "<|im_end|>"
# Each message is rendered unchanged to its end, so that later messages never change earlier text.
_TEMPLATE = r"""
{%- if messages[0].role != 'system' and (default or tools) %}
    {%- set messages = [{'role': 'system', 'content': default}] + messages %}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\n' }}
    {%- if message.role == 'tool' %}
        {{- '<tool_response>\n' ~ message.content ~ '\n</tool_response>' }}
    {%- else %}
        {{- message.content or '' }}
    {%- endif %}
    {%- if loop.first and tools %}
        {{- '\n\n# Tools\n\nYou may call these functions:\n<tools>' }}
        {%- for tool in tools %}
            {{- '\n' + (tool | tojson) }}
        {%- endfor %}
        {{- '\n</tools>\nFor a call, write its name and its arguments as JSON between tags:\n<tool_call>\n' }}
        {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {%- set call = call.function or call %}
        {{- '\n' if message.content or not loop.first }}
        {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) }}
        {{- '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""


def chatml_tools(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Give the tokenizer of a ChatML model a chat template that shows tools and their results. Returns the tokenizer.

    Calls are JSON between `<tool_call>` tags, as for Qwen2.5; the model must learn them. Conversations without tools
    are rendered as before if the old template writes only role and content, and its default system message stays.
    Checkpoints are saved with the new template.

    Raises ValueError if the tokenizer's messages do not end with `<|im_end|>`, or its chat template shows tools.
    """
    given: Any = tokenizer
    if given.chat_template is None or not {_START, _END} <= {*given.get_vocab()}:
        lacks = "chat template" if given.chat_template is None else f"{_START} and {_END} in its vocabulary"
        raise ValueError(f"tokenizer has no {lacks}, but must have a template of ChatML")
    if given.eos_token != _END:
        raise ValueError(f"`tokenizer.eos_token` is {given.eos_token!r}, but must be {_END!r}, which ends messages")
    if supports_tool_calling(given):
        raise ValueError("tokenizer has a chat template that shows tools: it must be left as it is")
    shown = given.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    before = shown.partition(f"{_START}user\n")[0]
    default = before.removeprefix(f"{_START}system\n").removesuffix(f"{_END}\n")
    given.chat_template = f"{{%- set default = {default!r} %}}{_TEMPLATE}"
    given.response_template = qwen3_template
    return tokenizer


def check_template(policy: str, given: Mapping[str, Any], trust_remote_code: bool) -> None:
    """Raise ValueError if a trainer is given tools, but the chat template cannot show their calls and results.

    `given` are the trainer's arguments, by name.
    """
    if not (given.get("tools") or given.get("environment_factory")):
        return
    processing_class: Any = given.get("processing_class")
    if processing_class is None:
        of_policy: Any = AutoProcessor
        processing_class = of_policy.from_pretrained(policy, trust_remote_code=trust_remote_code)
    if not supports_tool_calling(processing_class):
        raise ValueError(
            "tools or an environment are given, but the chat template shows no tool calls: "
            "`processing_class=chatml_tools(tokenizer)` gives a ChatML model another template, and "
            "`rollout_func=AgentRollout(ToolBox(tools, environment_factory))` needs none."
        )
