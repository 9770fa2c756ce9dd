"""TRL's own tools (`tools=`, `environment_factory=`): sanitizes what they return, or runs them in a rollout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from threading import Lock
from typing import Any

from sorl_trl.agents.agent_rollout import AgentRollout
from sorl_trl.checks import POSITIVE_COUNT
from sorl_trl.rollout import ChatProtocol, Sanitizer, SearchResponder, TagProtocol, ToolBox, Unavailable
from sorl_trl.rollout.environments.tools import fits
from sorl_trl.rollout.greetings import Greeter, is_image, is_text
from sorl_trl.search import RetryPolicy, SearchBackend
from sorl_trl.search.backend import is_thread_safe
from sorl_trl.text import round_brackets
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
    themselves are changed, so that reward functions read what the policy read, except lists that tools returned,
    which reward functions get as they are. The trainer's overrides of TRL's methods call these methods.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._completions: list[list[dict[str, Any]]] = []
        """The messages of each trajectory, to which TRL's tool loop appends, and among which results are put in order.

        `_tool_call_loop` sets it for `_get_tool_suffix_ids`, which TRL calls in it with the last results alone.
        """

    @cached_property
    def _greeter(self) -> Greeter:
        return Greeter(self._trainer._tokenizer)

    @cached_property
    def _sanitizer(self) -> Sanitizer:
        return Sanitizer(self._trainer._tokenizer)

    @cached_property
    def _results(self) -> Greeter:
        # A result cut to this length is still too long for the completion, so TRL drops it, as it would the whole.
        return Greeter(self._trainer._tokenizer, max_tokens=self._trainer.max_completion_length)

    def greeting(self, own: Any, content: Any) -> Any:
        """The content of a prompt's last message, whose beginning is the user's `own`, with the rest sanitized."""
        return self._greeter.clean(own, content)

    def note_completions(self, completions: list[list[dict[str, Any]]]) -> None:
        """Remember the messages to which TRL's tool loop is about to append."""
        self._completions = completions

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

    def suffix_ids(
        self, messages: list[dict[str, Any]], write: Callable[[list[dict[str, Any]]], list[int]]
    ) -> list[int]:
        """What TRL's method `write` makes of the messages of tools, sanitized and in the order of their calls."""
        messages = self._in_order(messages)
        for message in messages:
            message["name"] = self._results.clean("", _plain(message["name"]))
            if not isinstance(message["content"], list | Unavailable):
                message["content"] = self._results.clean("", _plain(message["content"]))
        shown = [
            {**message, "content": self._shown(message, write)} if isinstance(message["content"], list) else message
            for message in messages
        ]
        return write(shown)

    def _in_order(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The results of a message's calls in the order of the calls, in the trajectory as well.

        TRL puts the results of coroutines behind all others, and images into that order, in which they stay.
        """
        count = len(messages)
        for row, said in enumerate(self._completions):
            if said[-1] is messages[-1]:
                calls = said[-count - 1].get("tool_calls") or ()
                late = [self._is_awaited(row, call) for call in calls]
                places = sorted(range(len(late)), key=late.__getitem__)
                if len(places) != count:
                    break
                ordered = [messages[places.index(place)] for place in range(count)]
                if [*filter(_has_image, ordered)] == [*filter(_has_image, messages)]:
                    said[-count:] = ordered
                    return ordered
        return messages

    def _is_awaited(self, row: int, call: dict[str, Any]) -> bool:
        """Whether TRL awaits a call after it has made the others."""
        name, arguments = (call.get("function", {}).get(key) for key in ("name", "arguments"))
        if name in self._trainer._sync_tool_dicts[row]:
            return False
        tool = self._trainer._async_tool_dicts[row].get(name)
        return tool is not None and fits(tool, arguments)

    def _shown(self, message: dict[str, Any], write: Callable[[list[dict[str, Any]]], list[int]]) -> Any:
        """A list that a tool returned, for the template: as a list if the template writes lists, otherwise as text."""
        content = message["content"]
        if content and all(is_text(each) or is_image(each) for each in content):
            return self._results.clean([], content)
        plain = _plain(content)
        text = self._results.clean("", plain)
        try:
            harmless, bracketed = (_changed(content, change) for change in (self._sanitizer.clean, round_brackets))
            said: list[Any] = [harmless, [], bracketed or ["x"]]
            ids, empty, expected = (write([{**message, "content": each}]) for each in said)
        except Exception:  # a template may raise anything
            return text
        if len(text) < len(plain) or expected == empty:  # it is too long, or the template leaves out what lists hold
            return text
        # A template may join what the list holds to tags and control tokens.
        return harmless if self._sanitizer.found(ids) == self._sanitizer.found(expected) else bracketed


def _plain(value: Any) -> str:
    """`str(value)`, without any subclass of `str`."""
    return str.__str__(str(value))


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """A copy with changed texts. Raises TypeError for types other than those of JSON and tuples."""
    kind = type(value)
    if kind is str:
        return change(value)
    if kind in (list, tuple):
        return kind(_changed(each, change) for each in value)
    if kind is dict:
        return {_changed(key, change): _changed(each, change) for key, each in value.items()}
    if value is None or kind in (bool, int, float):
        return value
    raise TypeError(f"{kind.__name__} is no type of JSON")


def _has_image(message: Mapping[str, Any]) -> bool:
    return isinstance(message["content"], list) and any(map(is_image, message["content"]))
