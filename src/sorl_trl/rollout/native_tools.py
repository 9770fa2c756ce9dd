"""TRL's own tools (`tools=`, `environment_factory=`): calls them and sanitizes results, or runs them in a rollout."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any

from sorl_trl.checks import POSITIVE_COUNT
from sorl_trl.rollout import SearchResponder, TagProtocol, ToolBox, Unavailable
from sorl_trl.rollout.agent_rollout import AgentRollout
from sorl_trl.rollout.observation import MessageSanitizer, is_image, is_text
from sorl_trl.rollout.responder import start_awaiting
from sorl_trl.rollout.tools import Tool, call_tool, methods_of, named
from sorl_trl.search import RetryPolicy, SearchBackend
from sorl_trl.search.backend import is_thread_safe
from sorl_trl.types import ActionKind


def search_tool(backend: SearchBackend, k: int = 3, retry: RetryPolicy | None = None) -> Callable[[str], str]:
    """A search engine as a tool, `tools=[search_tool(backend)]`, that returns at most `k` passages per query.

    It returns what `SearchRollout` puts between its tags: the best passages, or a note that there are none or that the
    query was refused. If the engine is down after all retries, it returns an `Unavailable`; this package's trainers
    then mask the trajectory, whereas `trl.GRPOTrainer` trains on it. Calls wait for their retries one after the other;
    `retry` sets how long, by default as long as `SearchRollout` waits once for all calls. Only one thread at a time
    queries an engine that does not set `thread_safe = True`.

    Raises ValueError if `k` is below 1.
    """
    POSITIVE_COUNT.check("k", k)
    responder = SearchResponder(backend, top_k=k, retry=retry)
    alone: AbstractContextManager[Any] = nullcontext() if is_thread_safe(backend) else Lock()

    def search(query: str) -> str:
        """
        Search a collection of passages.

        Args:
            query: What to look for, in a few words.

        Returns:
            The passages that fit best, each with its title.
        """
        with alone:
            reply = responder.search([query])[query]
        return reply.text if reply.stop is None else Unavailable("the search engine is unavailable")

    return search


def answer_in_messages(completion: Sequence[Mapping[str, Any]]) -> str | None:
    """The answer in the first assistant message that gives one, or None. Tool messages do not count.

    For reward functions of trainers with `tools` or `environment_factory`, because TRL then passes each completion as
    a list of messages. `TagProtocol.parse` finds the answer, as for `SearchRollout`: the first closing tag of a
    message decides. With `SearchRollout`, read `Trajectory.answer` instead, because its completions include the
    observations.

    Raises TypeError if the completion is a plain string.
    """
    if isinstance(completion, str):
        raise TypeError(f"completion is the string {completion[:80]!r}, but must be a list of messages")
    texts = [message.get("content") or "" for message in completion if message["role"] == "assistant"]
    actions = map(TagProtocol().parse, texts)
    return next((action.content for action in actions if action.kind is ActionKind.ANSWER), None)


def tools_as_rollout(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a trainer, with `tools` and `environment_factory`, if given, replaced by an `AgentRollout`.

    As in TRL, the environments' `get_reward` counts as a reward of weight 1. Raises ValueError without a
    `train_dataset`, because the next prompts must be known.
    """
    tools, factory = given.get("tools"), given.get("environment_factory")
    if not (tools or factory) or given.get("rollout_func") is not None:
        return dict(given)
    if given.get("train_dataset") is None:
        raise ValueError(
            f"`async_staleness` is {given['args'].async_staleness}, but `train_dataset` is None: asynchronous "
            "rollouts need a `datasets.Dataset` of prompts, which environments cannot replace."
        )
    box = ToolBox(tools or (), factory)
    functions = given.get("reward_funcs")
    functions = [] if functions is None else functions if isinstance(functions, list) else [functions]
    args, own = given["args"], box.rewards
    if args.reward_weights is not None:
        args = copy.copy(args)
        args.reward_weights = [*args.reward_weights, *[1.0] * len(own)]
    processors = given.get("reward_processing_classes")
    if processors is not None:
        processors = [*(processors if isinstance(processors, list) else [processors]), *[None] * len(own)]
    changed = {"args": args, "reward_funcs": [*functions, *own], "reward_processing_classes": processors}
    without = {name: value for name, value in given.items() if name not in ("tools", "environment_factory")}
    return {**without, **changed, "rollout_func": AgentRollout(box)}


class ToolSanitizer:
    """Ensures that no tool in TRL's tool loop can forge a message, a tag or a control token.

    All environment text is sanitized before it is templated: results and error messages of tools, the names under
    which the policy called them, and what an environment's `reset` adds to the prompt. The messages themselves are
    changed, so that reward functions read what the policy read; only lists that tools returned are passed to reward
    functions unchanged. The trainer's overrides of TRL's methods call these methods.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @functools.cached_property
    def _sanitizer(self) -> MessageSanitizer:
        return MessageSanitizer(self._trainer._tokenizer)

    def greeting(self, own: Any, content: Any) -> Any:
        """The content of a prompt's last message: the user's `own` text at its beginning, and the rest sanitized."""
        return self._sanitizer.clean(own, content)

    def tools_of(self, environment: Any) -> dict[str, Tool]:
        """The tools of a row by name: those of the trainer, and the methods of the row's environment if it has one.

        TRL calls them one after the other. `call_tool` handles results, errors and masking, as in a `ToolBox`.
        """
        tools = named([*self._trainer._standalone_tools, *methods_of(environment)])
        return {name: self._called(tool) for name, tool in tools.items()}

    def _called(self, tool: Tool) -> Tool:
        @functools.wraps(tool)
        def call(**arguments: Any) -> Any:
            return call_tool(tool, arguments, self._wait)

        return call

    def _wait(self, value: Any) -> Any:
        """A value, awaited in TRL's event loop if it is awaitable; TRL has one if a tool is a coroutine function."""
        return start_awaiting(value, self._trainer.async_loop).result() if inspect.isawaitable(value) else value

    def masked(self, result: tuple[Any, ...]) -> tuple[Any, ...]:
        """The return value of TRL's tool loop, with trajectories masked if a tool was down."""
        tool_mask, completions, *others = result
        for row, messages in enumerate(completions):
            if any(isinstance(message.get("content"), Unavailable) for message in messages):
                tool_mask[row] = [0] * len(tool_mask[row])
        neutralized, self._sanitizer.neutralized = self._sanitizer.neutralized, 0
        self._trainer._log_metric("rollout/neutralized_per_trajectory", neutralized / len(completions))
        return tool_mask, completions, *others

    def suffix_ids(
        self, messages: list[dict[str, Any]], write: Callable[[list[dict[str, Any]]], list[int]]
    ) -> list[int]:
        """The ids that TRL's method `write` gives for tool messages, sanitized."""
        for message in messages:
            message["name"] = self._clean("", message["name"])
            if not isinstance(message["content"], list | Unavailable):
                message["content"] = self._clean("", message["content"])
        return write([{**message, "content": self._shown(message["content"])} for message in messages])

    def _shown(self, content: Any) -> Any:
        """A message's content for the template: a list as text, unless it shows images to a policy that reads them."""
        if not isinstance(content, list):
            return content
        if self._trainer._is_vlm and content and all(is_text(each) or is_image(each) for each in content):
            return self._clean([], content)
        return self._clean("", str(content))

    def _clean(self, own: Any, content: Any) -> Any:
        # A result cut to this length is still too long for the completion, so TRL drops it, as it would the whole.
        return self._sanitizer.clean(own, content, self._trainer.max_completion_length)
