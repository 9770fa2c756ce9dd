"""How a policy is asked and how far it may go, as the arguments of a script say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from transformers import PreTrainedTokenizerBase

from sorl_trl.checks import COUNT, POSITIVE_COUNT, SWITCH, Checked, OneOf, Problem
from sorl_trl.qa import SEARCH_R1_TEMPLATE
from sorl_trl.rollout.limits import LONG_OBSERVATION, RolloutLimits
from sorl_trl.rollout.protocol import Frame, TagProtocol, chat_message_frame

PROTOCOLS: Mapping[str, TagProtocol] = {
    "search_r1": TagProtocol(),
    "terse": TagProtocol(
        passage_template="{text}",
        no_results="nothing",
        search_failed="failed",
        invalid_feedback="invalid",
        information_frame=Frame("<information>", "</information>"),
        feedback_frame=Frame(),
        message_frame=Frame(),
    ),
}
"""Protocols by the names that recipes use. "terse" is for tiny policies, which copy best from short observations."""


@dataclass
class RolloutArguments(Checked):
    """What the policy is told, and the limits of a trajectory except for its total number of tokens.

    Raises ValueError for a value that is not allowed.
    """

    prompt_template: str = field(
        default=SEARCH_R1_TEMPLATE, metadata={"help": "The prompt, with `{question}` where the question goes."}
    )
    chat: Annotated[bool, SWITCH] = field(
        default=False, metadata={"help": "Ask through the tokenizer's chat template; plain text by default."}
    )
    protocol: Annotated[str, OneOf(tuple(PROTOCOLS))] = field(
        default="search_r1",
        metadata={"help": "How observations are worded: 'search_r1', or 'terse' for the sandbox's tiny policies."},
    )
    max_turns: Annotated[int, COUNT] = field(
        default=2, metadata={"help": "Searches (or invalid actions) before the last generation."}
    )
    max_turn_tokens: Annotated[int, POSITIVE_COUNT] = field(default=500, metadata={"help": "Tokens of one turn."})
    max_observation_tokens: Annotated[int, POSITIVE_COUNT] = field(
        default=500, metadata={"help": "Tokens of one observation, tags included."}
    )
    on_long_observation: Annotated[str, LONG_OBSERVATION] = field(
        default="truncate", metadata={"help": "'truncate' a longer observation, or 'stop' the trajectory there."}
    )
    search_top_k: Annotated[int, POSITIVE_COUNT] = field(default=3, metadata={"help": "Passages per search."})

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if "{question}" not in self.prompt_template:
            what = f"`prompt_template` is {self.prompt_template!r}, but must hold '{{question}}'."
            yield Problem("prompt_template", what)

    def limits(self, max_trajectory_tokens: int) -> RolloutLimits:
        """Limit a trajectory to so many tokens after the prompt. Raises ValueError for a number below 1."""
        return RolloutLimits(
            max_turns=self.max_turns,
            max_turn_tokens=self.max_turn_tokens,
            max_observation_tokens=self.max_observation_tokens,
            max_trajectory_tokens=max_trajectory_tokens,
            top_k=self.search_top_k,
            on_long_observation=self.on_long_observation,  # type: ignore[arg-type]
        )

    def tag_protocol(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None
    ) -> TagProtocol:
        """Make the protocol of that name; with `chat`, the chat template's frame replaces its default `message_frame`.

        `template_kwargs` go to that template, as the trainer's `chat_template_kwargs` do for prompts.

        Raises ValueError if the chat template does not show both sides of a conversation.
        """
        protocol = PROTOCOLS[self.protocol]
        if self.chat and protocol.message_frame == TagProtocol().message_frame:
            return replace(protocol, message_frame=chat_message_frame(tokenizer, template_kwargs))
        return protocol
