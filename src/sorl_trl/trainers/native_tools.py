"""TRL's own tool loop (`tools=`, `environment_factory=`), safe against what tools say and engines that fail."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial, wraps
from typing import Any

from trl import GRPOTrainer

from sorl_trl.rollout import TagProtocol
from sorl_trl.rollout.retrieval import Retriever, SearchFailure
from sorl_trl.rollout.sanitize import Sanitizer
from sorl_trl.search import RetryPolicy, SearchBackend, SearchUnavailable

_NO_BRACKETS = str.maketrans("<>[]", "()()")


def search_tool(backend: SearchBackend, k: int = 3, retry: RetryPolicy | None = None) -> Callable[[str], str]:
    """A search engine as a tool: `tools=[search_tool(backend)]`. `k` is the most passages per query.

    It answers what an observation of `SearchRollout` says between its tags: the best passages, or that there are none,
    or that the query was refused. With the engine down, retries included, it raises SearchUnavailable: the trainers of
    this package mask the trajectory then; `trl.GRPOTrainer` makes it a message to the policy and trains on it. TRL
    calls tools one at a time, so that each call waits for its own retries: `retry` says how long, by default as long
    as `SearchRollout` waits once for all.

    Raises ValueError for a `k` below 1.
    """
    if k < 1:
        raise ValueError(f"k={k} must be at least 1")
    protocol = TagProtocol()
    retriever = Retriever(backend, k, retry or RetryPolicy())

    def search(query: str) -> str:
        """
        Search a collection of passages.

        Args:
            query: What to look for, in a few words.

        Returns:
            The passages that fit best, each with its title.
        """
        outcome = retriever.search([query])[query]
        if outcome is SearchFailure.UNAVAILABLE:
            raise SearchUnavailable("the search engine is unavailable")
        if outcome is SearchFailure.REFUSED:
            return protocol.search_failed
        return protocol.render_passages(outcome)

    return search


def answer_in_messages(completion: Sequence[Mapping[str, Any]]) -> str | None:
    """What stands in the last `<answer>…</answer>` that the assistant wrote, or None. Tools' messages do not count.

    For reward functions of trainers with `tools` or `environment_factory`, where TRL hands each completion over as a
    list of messages. With `SearchRollout` read `Trajectory.answer`: its completions hold the observations too.

    Raises TypeError for a completion that is a plain string.
    """
    if isinstance(completion, str):
        raise TypeError(f"completion is the string {completion[:80]!r}, but must be a list of messages")
    said = [message.get("content") or "" for message in completion if message["role"] == "assistant"]
    for text in reversed(said):
        before, closing, _ = text.rpartition("</answer>")
        _, opening, answer = before.rpartition("<answer>")
        if closing and opening and answer.strip():
            return str(answer.strip())
    return None


class NativeTools(GRPOTrainer):
    """`GRPOTrainer` in whose conversations no tool can forge a message, a tag or a control token.

    Whatever the environment says is sanitized before it is templated: results and error messages of tools, the name
    under which the policy called one, and what `reset` of an environment adds to the prompt. The messages themselves
    are changed, so that reward functions read what the policy read.

    A trajectory in which a tool raised `SearchUnavailable` is masked: it says nothing about the policy. Every other
    exception of a tool is a message to the policy: TRL catches them all, programming errors too.
    """

    environment_factories: dict[str | None, Callable[[], Any]] | None
    _environment_pool: dict[str | None, list[Any]]
    _sync_tool_dicts: list[dict[str, Callable[..., Any]]]
    _async_tool_dicts: list[dict[str, Callable[..., Any]]]
    _neutralized = 0
    """Hits in what the environment said since the last rollout was logged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.environment_factories is not None:
            factories = self.environment_factories.items()
            self.environment_factories = {name: partial(self._build_environment, make) for name, make in factories}
            for pool in self._environment_pool.values():  # TRL has built one of each, to see its tools
                for environment in pool:
                    self._make_reset_safe(environment)

    @cached_property
    def _sanitizer(self) -> Sanitizer:
        return Sanitizer(self._tokenizer)

    def _tool_call_loop(self, prompts: list[Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        unavailable: set[int] = set()
        for tools in (self._sync_tool_dicts, self._async_tool_dicts):
            for row, by_name in enumerate(tools):
                tools[row] = {name: _reporting(tool, partial(unavailable.add, row)) for name, tool in by_name.items()}
        result: tuple[Any, ...] = super()._tool_call_loop(prompts, *args, **kwargs)
        tool_mask = result[0]
        for row in unavailable:
            tool_mask[row] = [0] * len(tool_mask[row])
        self._log_metric("rollout/neutralized_per_trajectory", self._neutralized / len(prompts))
        self._neutralized = 0
        return result

    def _get_tool_suffix_ids(self, tool_messages: list[dict[str, Any]]) -> list[int]:
        for message in tool_messages:
            message["name"] = self._harmless(message["name"])
            # What is cut is still too long for the completion: TRL drops it, as it would have dropped the whole.
            message["content"] = self._harmless(message["content"], self.max_completion_length)
        suffix_ids: list[int] = super()._get_tool_suffix_ids(tool_messages)
        return suffix_ids

    def _build_environment(self, factory: Callable[[], Any]) -> Any:
        environment = factory()
        self._make_reset_safe(environment)
        return environment

    def _make_reset_safe(self, environment: Any) -> None:
        reset = environment.reset

        @wraps(reset)
        def safe_reset(**kwargs: Any) -> Any:
            return self._harmless(reset(**kwargs))

        environment.reset = safe_reset

    def _harmless(self, content: Any, max_tokens: int | None = None) -> Any:
        """Text, or text blocks between images, made harmless; the hits are added to `_neutralized`."""
        if isinstance(content, str):
            harmless = self._sanitizer.sanitize(content, len(content) if max_tokens is None else max_tokens)
            self._neutralized += harmless.neutralized
            return harmless.text
        if not isinstance(content, list):
            return content
        blocks = _map_strings(content, partial(self._harmless, max_tokens=max_tokens))
        # A template may write blocks of text one right after the other, and so join the halves of a tag.
        joined = "".join(str(block.get("text", "")) for block in blocks if isinstance(block, dict))
        if hits := self._sanitizer.sanitize(joined, len(joined)).neutralized:
            self._neutralized += hits
            return _map_strings(blocks, lambda text: text.translate(_NO_BRACKETS))
        return blocks


def _map_strings(value: Any, change: Callable[[str], Any]) -> Any:
    """Lists and dictionaries with each string in them changed, keys too: a template may write out either whole."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    return value


def _reporting(tool: Callable[..., Any], report: Callable[[], None]) -> Callable[..., Any]:
    """The tool, which also reports that its search engine is unavailable."""
    if inspect.iscoroutinefunction(tool):

        @wraps(tool)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            try:
                return await tool(*args, **kwargs)
            except SearchUnavailable:
                report()
                raise

        return call_async

    @wraps(tool)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return tool(*args, **kwargs)
        except SearchUnavailable:
            report()
            raise

    return call
