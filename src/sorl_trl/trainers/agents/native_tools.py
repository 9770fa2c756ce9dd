"""TRL's own tool loop (`tools=`, `environment_factory=`), safe against what tools say and engines that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from sorl_trl.checks import POSITIVE_COUNT
from sorl_trl.rollout import Retriever, Sanitizer, SearchFailure, TagProtocol, Unavailable
from sorl_trl.rollout.greetings import Greeter, is_image, is_text
from sorl_trl.search import RetryPolicy, SearchBackend
from sorl_trl.text import round_brackets
from sorl_trl.types import ActionKind


def search_tool(backend: SearchBackend, k: int = 3, retry: RetryPolicy | None = None) -> Callable[[str], str]:
    """A search engine as a tool: `tools=[search_tool(backend)]`. `k` is the most passages per query.

    It answers what an observation of `SearchRollout` says between its tags: the best passages, or that there are none,
    or that the query was refused. With the engine down, retries included, it says so: the trainers of this package
    mask the trajectory then; `trl.GRPOTrainer` trains on it. Each call waits for its own retries, one call after
    another: `retry` says how long, by default as long as `SearchRollout` waits once for all.

    Raises ValueError for a `k` below 1.
    """
    POSITIVE_COUNT.check("k", k)
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
            return Unavailable("the search engine is unavailable")
        if outcome is SearchFailure.REFUSED:
            return protocol.search_failed
        return protocol.render_passages(outcome)

    return search


def answer_in_messages(completion: Sequence[Mapping[str, Any]]) -> str | None:
    """The answer of the first message of the assistant's that gives one, or None. Tools' messages do not count.

    What an answer is, `TagProtocol.parse` says, as it does for `SearchRollout`: the first closing tag of a message
    decides. For reward functions of trainers with `tools` or `environment_factory`, where TRL hands each completion
    over as a list of messages. With `SearchRollout` read `Trajectory.answer`: its completions hold the observations
    too.

    Raises TypeError for a completion that is a plain string.
    """
    if isinstance(completion, str):
        raise TypeError(f"completion is the string {completion[:80]!r}, but must be a list of messages")
    said = [message.get("content") or "" for message in completion if message["role"] == "assistant"]
    actions = map(TagProtocol().parse, said)
    return next((action.content for action in actions if action.kind is ActionKind.ANSWER), None)


Render = Callable[[list[dict[str, Any]]], list[int]]


class HarmlessTools:
    """Sees to it that, in TRL's tool loop, no tool can forge a message, a tag or a control token.

    Whatever the environment says is sanitized before it is templated: results and error messages of tools, the name
    under which the policy called one, and what `reset` of an environment adds to the prompt. The messages themselves
    are changed, so that reward functions read what the policy read. Nothing of the trainer is changed: its overrides
    of TRL's methods call these.

    Args:
        trainer: a `GRPOTrainer`.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._own: list[Any] = []
        """The content of each prompt's last message, before an environment has added to it."""
        self._neutralized = 0

    @cached_property
    def _sanitizer(self) -> Sanitizer:
        return Sanitizer(self._trainer._tokenizer)

    def note_prompts(self, inputs: Sequence[Mapping[str, Any]]) -> None:
        """Keep what the prompts say, before environments are reset."""
        if self._trainer.environment_factories is not None:
            prompts = [row.get("prompt", "") for row in inputs]
            self._own = [
                _copied("" if isinstance(prompt, str) else prompt[-1].get("content") or "") for prompt in prompts
            ]

    def clean_prompts(self, prompts: list[Any]) -> None:
        """Make harmless what `reset` has added, in the very list that TRL gives to the reward functions afterwards."""
        if self._trainer.environment_factories is None:
            return
        greeter = Greeter(self._trainer._tokenizer)
        for i, (prompt, own) in enumerate(zip(prompts, self._own, strict=True)):
            if not isinstance(prompt, str) and prompt[-1].get("content") is not None:
                last = {**prompt[-1], "content": greeter.clean(own, prompt[-1]["content"])}
                prompts[i] = [*prompt[:-1], last]
        self._neutralized += greeter.neutralized

    def masked(self, result: tuple[Any, ...]) -> tuple[Any, ...]:
        """What TRL's tool loop has returned, with the trajectories masked to which a tool said that it is down."""
        tool_mask, completions, *others = result
        for row, messages in enumerate(completions):
            if any(isinstance(message.get("content"), Unavailable) for message in messages):
                tool_mask[row] = [0] * len(tool_mask[row])
        self._trainer._log_metric("rollout/neutralized_per_trajectory", self._neutralized / len(completions))
        self._neutralized = 0
        return tool_mask, completions, *others

    def suffix_ids(self, render: Render, messages: list[dict[str, Any]]) -> list[int]:
        """The token ids that `render` makes of tools' messages, which are changed until they bring nothing in.

        A template may make more of a message than stands in it, such as join the halves of a tag. So what the policy
        reads may hold the control tokens and tags that the template writes for messages that say nothing, no others.
        """
        for message in messages:
            message["name"] = self._sanitize(_plain(message["name"]))
            message["content"] = self._harmless(message["content"])
        weaker = [_weaker(message["content"]) for message in messages]
        while True:
            suffix_ids = render(messages)
            # One that is too long for the completion TRL drops, whatever it holds.
            is_dropped = len(suffix_ids) > self._trainer.max_completion_length
            if is_dropped or self._brings_nothing_in(suffix_ids, messages, render):
                return suffix_ids
            forms = [next(each, None) for each in weaker]
            if all(form is None for form in forms):
                return suffix_ids
            self._neutralized += 1
            for message, form in zip(messages, forms, strict=True):
                message["content"] = message["content"] if form is None else form
                message["name"] = message["name"] if message["name"].isidentifier() else "unknown"

    def _brings_nothing_in(self, suffix_ids: list[int], messages: list[dict[str, Any]], render: Render) -> bool:
        with_images = self._trainer._is_vlm
        neutral = [{**each, "name": "x", "content": _neutral(each["content"], with_images)} for each in messages]
        return self._sanitizer.found_in(suffix_ids) == self._sanitizer.found_in(render(neutral))

    def _harmless(self, content: Any) -> str | list[dict[str, Any]]:
        """What a tool returned, as text; content blocks, of text and images alone, stay blocks."""
        if isinstance(content, Unavailable):
            return content
        if isinstance(content, list) and content and all(is_text(each) or is_image(each) for each in content):
            return [self._harmless_block(block) for block in content]
        # What is cut is still too long for the completion: TRL drops it, as it would have dropped the whole.
        return self._sanitize(_plain(content), self._trainer.max_completion_length)

    def _harmless_block(self, block: dict[str, Any]) -> dict[str, Any]:
        kind = block["type"]
        value = block[kind]
        return {"type": kind, kind: self._sanitize(_plain(value)) if isinstance(value, str) else value}

    def _sanitize(self, text: str, max_tokens: int | None = None) -> str:
        harmless = self._sanitizer.sanitize(text, len(text) if max_tokens is None else max_tokens)
        self._neutralized += harmless.neutralized
        return harmless.text


def _plain(value: Any) -> str:
    """`str(value)`, whatever class of string that is."""
    return str.__str__(str(value))


def _copied(content: Any) -> Any:
    """An environment may change the very blocks that it is given."""
    return [dict(block) for block in content] if isinstance(content, list) else content


def _weaker(content: str | list[dict[str, Any]]) -> Iterator[str | list[dict[str, Any]]]:
    """What to say where a template makes more of the content: it without brackets, its images, nothing."""
    if isinstance(content, Unavailable):
        return
    if isinstance(content, str):
        yield round_brackets(content)
    else:
        yield [{**block, "text": round_brackets(block["text"])} if is_text(block) else block for block in content]
        if images := [block for block in content if is_image(block)]:
            yield images
    yield ""


def _neutral(content: str | list[dict[str, Any]], with_images: bool) -> str | list[dict[str, Any]]:
    """Content of the same shape that says nothing, with its images where the template's processor reads them."""
    if isinstance(content, str):
        return "x" if content.strip() else content
    image = {} if with_images else {"image": "image"}
    return [{"type": "text", "text": "x"} if is_text(block) else {**block, **image} for block in content]
