"""Handles the tools of a `ToolBox` with a `ChatProtocol`, which the chat template shows, as TRL handles its own."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from trl import GRPOTrainer
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
    supports_tool_calling,
)

from sorl_trl.rollout import ObservationEncoder, Responder, TagProtocol
from sorl_trl.rollout.protocol import message_end
from sorl_trl.types import Observation, ToolResult, Trajectory

_RESULTS = (ToolResult("first", "12 degrees"), ToolResult("second", "and rain\nin Oslo"))


def know_calls(trainer: Any) -> None:
    """Give the tokenizer a `response_template`, which parses calls, unless it has one.

    Raises ValueError if the chat template shows no tools, or TRL does not know it.
    """
    if not supports_tool_calling(trainer.processing_class):
        raise ValueError(
            "a `ToolBox` has a `ChatProtocol`, but the chat template shows no tool calls: "
            "`processing_class=chatml_tools(tokenizer)` gives a ChatML model another template, and a `ToolBox` "
            "without `protocol=ChatProtocol()` needs none."
        )
    if getattr(trainer._tokenizer, "response_template", None) is None:
        try:
            add_response_schema(trainer.processing_class)
        except ValueError as error:
            raise ValueError(
                "a `ToolBox` has a `ChatProtocol`, but `tokenizer.response_template` is None, and TRL knows none for "
                "this chat template: set one, with which transformers parses calls, or give the `ToolBox` no "
                "`protocol`."
            ) from error


def showing(trainer: Any, responder: Responder) -> Any:
    """A copy of the trainer for which TRL renders each prompt with the tools of its environment."""
    view = copy.copy(trainer)
    view.environment_factories = view._env_tools = responder.shown
    view._batch_environments = responder.kinds
    if not is_chat_template_prefix_preserving(view.processing_class):
        view.chat_template = get_training_chat_template(view.processing_class)
    return view


def check_results(view: Any, protocol: TagProtocol) -> None:
    """Raise ValueError if the chat template writes results of tools differently from the protocol."""
    ours = [*ObservationEncoder(view._tokenizer, protocol, sys.maxsize).information("", results=_RESULTS).token_ids]
    theirs = [*GRPOTrainer._get_tool_suffix_ids(view, [*map(_result, _RESULTS)])]  # ours would cut long ones
    if ours != theirs:
        end = message_end(view._tokenizer, view.chat_template_kwargs)
        if end not in (None, view._tokenizer.eos_token) and ours[-len(theirs) :] == theirs:
            raise ValueError(
                f"the chat template ends messages with {end!r}, but `tokenizer.eos_token` is "
                f"{view._tokenizer.eos_token!r}, so that TRL leaves out what the template writes after the end of a "
                f"message: set `tokenizer.eos_token = {end!r}`."
            )
        raise ValueError(
            "the chat template writes results of tools as a `ToolBox` cannot, as JSON or with the tool's name: give "
            "the trainer `tools=` without `async_staleness`, or the `ToolBox` a `TagProtocol`."
        )


def messages_of(
    trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The completion for reward functions, as messages: what TRL would make of the trajectory with its own tools.

    `tools` are the schemas of the tools that the prompt shows.
    """
    context, messages = [*trajectory.prompt_ids], list[dict[str, Any]]()
    for segment in trajectory.segments:
        if isinstance(segment, Observation):
            messages += map(_result, segment.results)
        else:
            messages.append(_message(tokenizer, [*segment.token_ids], context, tools))
        context += segment.token_ids
    return messages


def _result(result: ToolResult) -> dict[str, Any]:
    content = result.text if result.returned is None else result.returned
    return {"role": "tool", "name": result.tool, "content": content}


def _message(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], context: list[int], tools: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    try:
        return dict(parse_response(tokenizer, ids, prefix=context, tools=[*tools]))
    except RecursionError:  # brackets nest too deeply; TRL returns the same for other unreadable messages
        return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
