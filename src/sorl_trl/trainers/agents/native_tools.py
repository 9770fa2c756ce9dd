"""TRL's own tool loop (`tools=`, `environment_factory=`), safe against what tools say and engines that fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from accelerate.logging import get_logger
from jinja2 import TemplateError

from sorl_trl.checks import POSITIVE_COUNT, check_number
from sorl_trl.rollout import TagProtocol
from sorl_trl.rollout.environments.search import Retriever, SearchFailure
from sorl_trl.rollout.sanitize import Sanitizer
from sorl_trl.search import RetryPolicy, SearchBackend, SearchUnavailable
from sorl_trl.text import round_brackets
from sorl_trl.trainers.agents.tool_answers import ToolAnswers, tool_answers
from sorl_trl.trainers.agents.tool_calls import HangingCalls
from sorl_trl.trainers.agents.tool_messages import (
    MAX_WEAKER_FORMS,
    OwnContent,
    change_beyond,
    neutral_messages,
    plain_data,
    shown_text,
    text_of,
    weaker_forms,
)
from sorl_trl.types import ActionKind

logger = get_logger(__name__)


def search_tool(backend: SearchBackend, k: int = 3, retry: RetryPolicy | None = None) -> Callable[[str], str]:
    """A search engine as a tool: `tools=[search_tool(backend)]`. `k` is the most passages per query.

    It answers what an observation of `SearchRollout` says between its tags: the best passages, or that there are none,
    or that the query was refused. With the engine down, retries included, it raises SearchUnavailable: the trainers of
    this package mask the trajectory then; `trl.GRPOTrainer` makes it a message to the policy and trains on it. Each
    call waits for its own retries, with TRL one call after another: `retry` says how long, by default as long as
    `SearchRollout` waits once for all.

    Raises ValueError for a `k` below 1.
    """
    check_number("k", k, POSITIVE_COUNT)
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


class HarmlessTools:
    """Sees to it that, in TRL's tool loop, no tool can forge a message, a tag or a control token.

    Whatever the environment says is sanitized before it is templated: results and error messages of tools, the name
    under which the policy called one, and what `reset` of an environment adds to the prompt. The messages themselves
    are changed, so that reward functions read what the policy read.

    A trajectory in which a tool raised `SearchUnavailable` is masked: it says nothing about the policy. Every other
    exception of a tool is a message to the policy: TRL catches them all, programming errors too.

    Args:
        trainer: a `GRPOTrainer`.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._own_contents: list[OwnContent] = []
        self._neutralized = 0
        self._hanging = HangingCalls()
        self._answers: ToolAnswers | None = None
        """Of the rollout that is under way."""
        self._is_advised = False

    @cached_property
    def _sanitizer(self) -> Sanitizer:
        return Sanitizer(self._trainer._tokenizer)

    def note_prompts(self, inputs: Sequence[Mapping[str, Any]]) -> None:
        """Keep the last message of each prompt, before an environment's `reset` adds to it."""
        if self._trainer.environment_factories is not None:
            self._own_contents = [OwnContent.of(row.get("prompt", "")) for row in inputs]

    def clean_prompts(self, prompts: list[Any]) -> None:
        """Make harmless what `reset` has added, in the very list that TRL gives to the reward functions afterwards."""
        if self._trainer.environment_factories is None:
            return
        for i, (prompt, own) in enumerate(zip(prompts, self._own_contents, strict=True)):
            if not isinstance(prompt, str) and prompt[-1].get("content") is not None:
                last = {**prompt[-1], "content": self._harmless_beyond(own, prompt[-1]["content"])}
                prompts[i] = [*prompt[:-1], last]

    def run_loop(self, loop: Callable[..., tuple[Any, ...]], prompts: list[Any], *args: Any, **kwargs: Any) -> Any:
        """TRL's tool loop, in which calls are made as `tool_answers` says, and what became of them is logged."""
        trainer = self._trainer
        self._answers = answers = tool_answers(trainer, self._hanging)
        dicts = trainer._sync_tool_dicts, trainer._async_tool_dicts
        for row, own in enumerate(zip(*dicts, strict=True)):
            for tools, wrapped in zip(dicts, answers.wrapped(row, *own), strict=True):
                tools[row] = wrapped
        try:
            result = loop(prompts, *args, **kwargs)
            answers.check()
        finally:
            answers.close()
            self._answers = None
        tool_mask, *others, calls, failures, images = result
        for row in answers.unavailable:
            tool_mask[row] = [0] * len(tool_mask[row])
        self._give_up_busy_environments()
        self._log(answers, len(prompts), calls)
        return tool_mask, *others, calls, failures + answers.failures, images

    def _give_up_busy_environments(self) -> None:
        """Those that an unanswered call still runs on are not reset: the next rollout has new ones made."""
        if self._trainer.environment_factories is not None:
            for pool in self._trainer._environment_pool.values():
                pool[:] = [environment for environment in pool if not self._hanging.holds(environment)]

    def _log(self, answers: ToolAnswers, rows: int, calls: int) -> None:
        trainer = self._trainer
        trainer._log_metric("rollout/neutralized_per_trajectory", self._neutralized / rows)
        self._neutralized = 0
        if False and not trainer._is_vlm:
            counts = torch.tensor([[answers.late, calls]], device=trainer.accelerator.device)
            late, made = trainer.accelerator.gather(counts).sum(0).tolist()
            mode = "train" if trainer.model.training else "eval"
            trainer._metrics[mode]["tools/timeout_frequency"].append(late / made if made else 0.0)
        if not self._is_advised and (advice := answers.advice()) and not trainer._is_vlm:
            self._is_advised = True
            logger.warning(advice)

    def suffix_ids(self, render: Callable[[list[dict[str, Any]]], list[int]], messages: list[dict[str, Any]]) -> Any:
        """The token ids that `render` makes of tools' messages, which are changed until they bring nothing in."""
        if self._answers is not None:
            self._answers.settle(messages)
        for message in messages:
            message["name"] = self._sanitize(text_of(message["name"]))
            message["content"] = self._harmless(message["content"])
        # A template may still make more of it: join the halves of a tag, or take a word for an image. So what the
        # policy reads may hold the control tokens and tags that the template writes for a message of this shape only.
        weaker = [weaker_forms(message["content"], self._sanitize) for message in messages]
        for _ in range(MAX_WEAKER_FORMS):
            suffix_ids = render(messages)
            # One that is too long for the completion TRL drops, whatever it holds.
            is_dropped = len(suffix_ids) > self._trainer.max_completion_length
            if is_dropped or self._brings_nothing_in(suffix_ids, messages, render):
                return suffix_ids
            self._neutralized += 1
            for message, forms in zip(messages, weaker, strict=True):
                message["content"] = next(forms, "")
                message["name"] = message["name"] if message["name"].isidentifier() else "unknown"
        return render(messages)

    def _brings_nothing_in(
        self,
        suffix_ids: list[int],
        messages: list[dict[str, Any]],
        render: Callable[[list[dict[str, Any]]], list[int]],
    ) -> bool:
        neutral = neutral_messages(messages, with_images=self._trainer._is_vlm)
        try:
            expected = self._sanitizer.found_in(render(neutral))
        except TemplateError:  # a template that refuses the shape has rendered it for what the words say
            return False
        return self._sanitizer.found_in(suffix_ids) == expected

    def _harmless(self, content: Any) -> str | list[Any]:
        """What a tool returned, in plain form (`tool_messages`), with nothing that it spells out left in it."""
        if isinstance(content, list):
            blocks: list[Any] = plain_data(content, self._rewrite)
            return blocks
        # What is cut is still too long for the completion: TRL drops it, as it would have dropped the whole.
        return self._sanitize(text_of(content), self._trainer.max_completion_length)

    def _harmless_beyond(self, own: OwnContent, content: Any) -> str | list[Any]:
        """A prompt's last message, with what `reset` added to the user's own made harmless."""
        own = own if own.begins(content) else OwnContent("", 0)
        harmless = change_beyond(own, content, self._sanitize)
        # Blocks, or the prompt's end and what comes after it, may be the halves of a tag.
        hits = self._sanitizer.rewrite(shown_text(harmless))[1] - self._sanitizer.rewrite(own.text)[1]
        if hits > 0:
            self._neutralized += hits
            return change_beyond(own, harmless, round_brackets)
        return harmless

    def _sanitize(self, text: str, max_tokens: int | None = None) -> str:
        harmless = self._sanitizer.sanitize(text, len(text) if max_tokens is None else max_tokens)
        self._neutralized += harmless.neutralized
        return harmless.text

    def _rewrite(self, text: str) -> str:
        rewritten, hits = self._sanitizer.rewrite(text)
        self._neutralized += hits
        return rewritten
