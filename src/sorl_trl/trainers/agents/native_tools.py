"""TRL's own tools (`tools=`, `environment_factory=`): sanitizes what they return, or runs them in a rollout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from threading import Lock
from typing import Any

from sorl_trl.checks import POSITIVE_COUNT
from sorl_trl.rollout import ChatProtocol, SearchResponder, TagProtocol, ToolBox, Unavailable
from sorl_trl.rollout.greetings import Greeter, is_image, is_text
from sorl_trl.search import RetryPolicy, SearchBackend
from sorl_trl.search.backend import is_thread_safe
from sorl_trl.trainers.agents.agent_rollout import AgentRollout
from sorl_trl.types import ActionKind


def search_tool(backend: SearchBackend, k: int = 3, retry: RetryPolicy | None = None) -> Callable[[str], str]:
    """A search engine as a tool, `tools=[search_tool(backend)]`, that returns at most `k` passages per query.

    It returns what `SearchRollout` puts between its tags: the best passages, or that there are none, or that the query
    was refused. If the engine is down after all retries, it says so; the trainers of this package then mask the
    trajectory, whereas `trl.GRPOTrainer` trains on it. Calls wait for their retries one after the other; `retry` sets
    how long, by default as long as `SearchRollout` waits once for all calls. Only one thread at a time queries an
    engine that does not set `thread_safe = True`.

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
    """The answer in the first assistant message that gives one, or None. Messages of tools do not count.

    It is for reward functions of trainers with `tools` or `environment_factory`, to which TRL passes each completion
    as a list of messages. `TagProtocol.parse` finds the answer, as for `SearchRollout`: the first closing tag of a
    message decides. With `SearchRollout`, read `Trajectory.answer` instead, because its completions include the
    observations.

    Raises TypeError if the completion is a plain string.
    """
    if isinstance(completion, str):
        raise TypeError(f"completion is the string {completion[:80]!r}, but must be a list of messages")
    said = [message.get("content") or "" for message in completion if message["role"] == "assistant"]
    actions = map(TagProtocol().parse, said)
    return next((action.content for action in actions if action.kind is ActionKind.ANSWER), None)


def tools_as_rollout(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a trainer, with an `AgentRollout` in place of `tools` and `environment_factory` if given.

    As in TRL, the environments' `get_reward` counts as a reward of weight 1. Raises ValueError without a
    `train_dataset`, because the prompts that come next must be known.
    """
    tools, factory = given.get("tools"), given.get("environment_factory")
    if not (tools or factory) or given.get("rollout_func") is not None:
        return dict(given)
    if given.get("train_dataset") is None:
        raise ValueError(
            f"`async_staleness` is {given['args'].async_staleness}, but `train_dataset` is None: prompts are sampled "
            "ahead from a `datasets.Dataset`, which environments cannot replace."
        )
    box = ToolBox(tools or (), factory, protocol=ChatProtocol())
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


class HarmlessTools:
    """Ensures that no tool in TRL's tool loop can forge a message, a tag or a control token.

    Everything that the environment says is sanitized before it is templated: results and error messages of tools, the
    names under which the policy called them, and what an environment's `reset` adds to the prompt. The messages
    themselves are changed, so that reward functions read what the policy read. The trainer's overrides of TRL's
    methods call these methods.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._own: list[Any] = []
        """The content of each prompt's last message, before an environment has added to it."""

    @cached_property
    def _greeter(self) -> Greeter:
        return Greeter(self._trainer._tokenizer)

    @cached_property
    def _results(self) -> Greeter:
        # A result cut to this length is still too long for the completion, so TRL drops it, as it would the whole.
        return Greeter(self._trainer._tokenizer, max_tokens=self._trainer.max_completion_length)

    def note_prompts(self, inputs: Sequence[Mapping[str, Any]]) -> None:
        """Remember the prompts before environments are reset."""
        if self._trainer.environment_factories is not None:
            prompts = [row.get("prompt", "") for row in inputs]
            self._own = [
                _copied("" if isinstance(prompt, str) else prompt[-1].get("content") or "") for prompt in prompts
            ]

    def clean_prompts(self, prompts: list[Any]) -> None:
        """Sanitize what `reset` has added, in the list that TRL passes to the reward functions afterwards."""
        if self._trainer.environment_factories is None:
            return
        for i, (prompt, own) in enumerate(zip(prompts, self._own, strict=True)):
            if not isinstance(prompt, str) and prompt[-1].get("content") is not None:
                last = {**prompt[-1], "content": self._greeter.clean(own, prompt[-1]["content"])}
                prompts[i] = [*prompt[:-1], last]

    def masked(self, result: tuple[Any, ...]) -> tuple[Any, ...]:
        """The return value of TRL's tool loop, with trajectories masked if a tool was down."""
        tool_mask, completions, *others = result
        for row, messages in enumerate(completions):
            if any(isinstance(message.get("content"), Unavailable) for message in messages):
                tool_mask[row] = [0] * len(tool_mask[row])
        neutralized = self._greeter.neutralized + self._results.neutralized
        self._greeter.neutralized = self._results.neutralized = 0
        self._trainer._log_metric("rollout/neutralized_per_trajectory", neutralized / len(completions))
        return tool_mask, completions, *others

    def clean_results(self, messages: list[dict[str, Any]]) -> None:
        """Sanitize the messages of tools."""
        for message in messages:
            message["name"] = self._results.clean("", _plain(message["name"]))
            message["content"] = self._harmless(message["content"])

    def _harmless(self, content: Any) -> str | list[dict[str, Any]]:
        """What a tool returned, as text. A list of nothing but text and image blocks stays a list."""
        if isinstance(content, Unavailable):
            return content
        if isinstance(content, list) and content and all(is_text(each) or is_image(each) for each in content):
            blocks: list[dict[str, Any]] = self._results.clean([], content)
            return blocks
        text: str = self._results.clean("", _plain(content))
        return text


def _plain(value: Any) -> str:
    """`str(value)`, without any subclass of `str`."""
    return str.__str__(str(value))


def _copied(content: Any) -> Any:
    """Copy the blocks of a content, because an environment may change the ones that it gets."""
    return [dict(block) for block in content] if isinstance(content, list) else content
