"""Chat templates: converts prompts to tokens and tokens to messages, as TRL does, and finds templates with tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoProcessor, PreTrainedTokenizerBase, ProcessorMixin
from trl.chat_template_utils import add_response_schema, parse_response, qwen3_template, supports_tool_calling
from trl.data_utils import is_conversational, prepare_multimodal_messages

from sorl_trl.rollout import RolloutLimits
from sorl_trl.rollout.observation import is_image
from sorl_trl.rollout.progress import Progress
from sorl_trl.rollout.protocol import MessageReader
from sorl_trl.text import storable
from sorl_trl.types import Observation, ToolResult, Trajectory

NO_PROMPT = [{"role": "user", "content": ""}]
"""TRL's, for rows whose environment writes the prompt."""
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


@dataclass(frozen=True)
class RolloutSetup:
    """What a rollout reads from its trainer, once: it may continue in a thread while the trainer trains."""

    processing_class: Any
    """The policy's tokenizer, or its processor."""
    chat_template: str | None = None
    """The template of messages; None for the one of `processing_class`."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    eos_token_ids: Sequence[int] = ()
    """The tokens that end a turn."""
    limits: RolloutLimits = field(default_factory=RolloutLimits)
    progress: Progress | None = None
    """Called after each poll."""

    @property
    def tokenizer(self) -> Any:
        return self.processing_class.tokenizer if self._is_processor else self.processing_class

    @property
    def _is_processor(self) -> bool:
        return isinstance(self.processing_class, ProcessorMixin)

    def encode(
        self, prompts: Sequence[Any], tools: Sequence[Sequence[dict[str, Any]]] | None = None
    ) -> list[list[int]]:
        """The token ids of prompts without images, as `GRPOTrainer._tokenize_prompts` encodes them.

        Args:
            prompts: Texts, or lists of messages that the policy's own message follows.
            tools: JSON schemas of the tools that the chat template shows in each prompt.
        """
        if not is_conversational({"prompt": prompts[0]}):
            return [*self.processing_class(text=[*prompts])["input_ids"]]
        encoded = []
        for prompt, shown in zip(prompts, tools or [()] * len(prompts), strict=True):
            messages = self.processing_class.apply_chat_template(
                conversation=[prepare_multimodal_messages(prompt) if self._is_processor else prompt],
                tools=[*shown] or None,
                chat_template=self.chat_template,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **self.chat_template_kwargs,
            )
            encoded.append(messages["input_ids"][0])
        return encoded


def holds_images(prompt: Any) -> bool:
    """Whether a prompt is a list of messages that includes an image."""
    contents = [] if isinstance(prompt, str) else [message.get("content") for message in prompt]
    return any(is_image(block) for content in contents if isinstance(content, list) for block in content)


def reads_calls(tokenizer: Any) -> bool:
    """Whether a tokenizer can parse tool calls in a message."""
    return getattr(tokenizer, "response_template", None) is not None


def ensure_response_template(policy: str, given: Mapping[str, Any], trust_remote_code: bool) -> Any:
    """The processing class of a trainer with tools, with a `response_template` that parses their calls.

    `given` are the trainer's arguments, by name. Without a `processing_class` among them, the `policy`'s is used.

    Raises ValueError if the chat template shows no tools, or TRL has no `response_template` for it.
    """
    processing_class: Any = given.get("processing_class")
    if processing_class is None:
        loader: Any = AutoProcessor
        left = {"truncation_side": "left", "padding_side": "left"}  # as TRL loads it
        processing_class = loader.from_pretrained(policy, trust_remote_code=trust_remote_code, **left)
    if not supports_tool_calling(processing_class):
        raise ValueError(
            "The chat template does not support tool calls, which tools and environments need: for a ChatML model, "
            "`processing_class=chatml_tools(tokenizer)` sets one that does, and the model must learn the calls; an "
            "environment with a method `step`, as in `rollout_func=AgentRollout(MyEnvironment)`, does not need one."
        )
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if not reads_calls(tokenizer):
        add_response_schema(processing_class)
    return processing_class


def messages_of(
    trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The completion for reward functions, as messages in the form that TRL's own tools would give.

    `tools` are the schemas of the tools that the prompt shows.
    """
    context, messages = [*trajectory.prompt_ids], list[dict[str, Any]]()
    for segment in trajectory.segments:
        if isinstance(segment, Observation):
            messages += map(_result, segment.results)
        else:
            read = parse_response(MessageReader(tokenizer), [*segment.token_ids], prefix=context, tools=[*tools])
            messages.append(dict(read))
        context += segment.token_ids
    return messages


def _result(result: ToolResult) -> dict[str, Any]:
    content = result.text if result.returned is None else result.returned
    return {"role": "tool", "name": result.tool, "content": content}


def tabular(completion: Any) -> Any:
    """A completion for TRL's table of completions, whatever policy and tools wrote into its messages.

    Parquet needs one type in all rows: contents become text, and arguments of calls become JSON objects as text.
    """
    if isinstance(completion, str):
        return completion
    return [storable({**message, **_as_text(message)}) for message in completion]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    texts: dict[str, Any] = {"content": content if isinstance(content, str | None) else str(content)}
    if calls := message.get("tool_calls"):
        texts["tool_calls"] = [_call_as_text(call.get("function", call)) for call in calls]
    return texts


def _call_as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    given = call.get("arguments")
    arguments = json.dumps(given if isinstance(given, dict) else {"arguments": given})
    return {"type": "function", "function": {"name": call.get("name"), "arguments": arguments}}


def chatml_tools(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Give a ChatML model's tokenizer a chat template that shows tools and their results; return the tokenizer.

    Calls are JSON between `<tool_call>` tags, as for Qwen2.5; the model must learn them. Conversations without tools
    are rendered as before, including a default system message, if the old template writes only role and content.
    Checkpoints are saved with the new template.

    Raises ValueError if the tokenizer's messages do not end with `<|im_end|>`, or its chat template shows tools.
    """
    given: Any = tokenizer
    if given.chat_template is None or not {_START, _END} <= {*given.get_vocab()}:
        lacks = "chat template" if given.chat_template is None else f"{_START} and {_END} in its vocabulary"
        raise ValueError(f"tokenizer has no {lacks}, but must have a ChatML template")
    if given.eos_token != _END:
        raise ValueError(f"`tokenizer.eos_token` is {given.eos_token!r}, but must be {_END!r}, which ends messages")
    if supports_tool_calling(given):
        raise ValueError("tokenizer's chat template already shows tools: use it as it is")
    shown = given.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    before = shown.partition(f"{_START}user\n")[0]
    default = before.removeprefix(f"{_START}system\n").removesuffix(f"{_END}\n")
    given.chat_template = f"{{%- set default = {default!r} %}}{_TEMPLATE}"
    given.response_template = qwen3_template
    return tokenizer
