"""How far a trajectory may go, how a rollout generates, and what the policy is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from transformers import PreTrainedTokenizerBase

from sorl_trl.checks import COUNT, POSITIVE_COUNT, SWITCH, Number, OneOf, check_fields
from sorl_trl.qa import SEARCH_R1_TEMPLATE
from sorl_trl.rollout.protocol import Frame, TagProtocol

POSITIVE = Number(above=0)
ENGINES = ("auto", "slots", "lockstep")

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


@dataclass(frozen=True)
class RolloutLimits:
    """The limits of one trajectory, in turns and in tokens. The defaults are those of Search-R1's `train_ppo.sh`.

    Raises ValueError for a limit out of range.
    """

    max_turns: Annotated[int, COUNT] = 2
    """Turns that may search or go wrong. One last generation, which cannot search, follows them; with 0 it is all."""
    max_turn_tokens: Annotated[int, POSITIVE_COUNT] = 500
    max_observation_tokens: Annotated[int, POSITIVE_COUNT] = 500
    """Tokens of an observation, its frame included."""
    max_trajectory_tokens: Annotated[int | None, POSITIVE_COUNT] = None
    """Tokens after the prompt, observations included. None is the trainer's `max_completion_length`; without a
    trainer there is then no such limit."""
    top_k: Annotated[int, POSITIVE_COUNT] = 3
    """Passages per query."""

    def __post_init__(self) -> None:
        check_fields(self)

    def within(self, max_completion_length: int) -> RolloutLimits:
        """The limits under a trainer. Raises ValueError where a trajectory may be longer than its completions."""
        if self.max_trajectory_tokens is None:
            return replace(self, max_trajectory_tokens=max_completion_length)
        if self.max_trajectory_tokens > max_completion_length:
            raise ValueError(
                f"`limits.max_trajectory_tokens` is {self.max_trajectory_tokens}, more than the trainer's "
                f"`max_completion_length` of {max_completion_length}. Lower the one or raise the other."
            )
        return self


@dataclass(frozen=True)
class EngineOptions:
    """How turns are generated, and when the replies to them rejoin: the distribution that is sampled stays the same.

    `rollout_engine` and `kv_cache_gib` are for transformers models; vLLM has an engine of its own. In lock-step every
    turn waits for all replies, as with a `rejoin_after` of 0.

    Raises ValueError for a value that is not allowed.
    """

    rollout_engine: Annotated[str, OneOf(ENGINES)] = field(
        default="auto",
        metadata={
            "help": "Without vLLM: 'slots' generates row by row and computes each token once, 'lockstep' calls "
            "`model.generate` for whole turns. 'auto' takes slots for models that they serve exactly, and says why "
            "where it cannot."
        },
    )
    rejoin_after: Annotated[int, COUNT] = field(
        default=32,
        metadata={
            "help": "Steps of the engine after which a row goes on with the reply to its turn, be it there sooner or "
            "waited for: about as many as a slow search takes. Ours: `benchmarks.rollout` measures it."
        },
    )
    kv_cache_gib: Annotated[float | None, POSITIVE] = field(
        default=None,
        metadata={
            "help": "GiB that keys and values of 'slots' may take; with less, fewer trajectories generate at once. By "
            "default three fifths of what is free on a GPU, on a CPU half of the memory that is available."
        },
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass
class RolloutArguments:
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
        metadata={
            "help": "How things are worded: 'search_r1', or 'terse' for small policies (short observations; of tasks, "
            "functions in a line each instead of the leaderboard's prompt)."
        },
    )
    max_turns: Annotated[int, COUNT] = field(
        default=2,
        metadata={
            "help": "Searches (or invalid actions) before the last generation, by default 2. Of the leaderboard's "
            "tasks: messages, by default as many as they may take, 21 for each request of the longest."
        },
    )
    max_turn_tokens: Annotated[int, POSITIVE_COUNT] = field(default=500, metadata={"help": "Tokens of one turn."})
    max_observation_tokens: Annotated[int, POSITIVE_COUNT] = field(
        default=500, metadata={"help": "Tokens of one observation, tags included."}
    )
    search_top_k: Annotated[int, POSITIVE_COUNT] = field(default=3, metadata={"help": "Passages per search."})

    def __post_init__(self) -> None:
        check_fields(self)
        if "{question}" not in self.prompt_template:
            raise ValueError(f"`prompt_template` is {self.prompt_template!r}, but must hold '{{question}}'.")

    @property
    def is_terse(self) -> bool:
        """Whether things are worded for a small policy."""
        return self.protocol == "terse"

    def limits(self, max_trajectory_tokens: int) -> RolloutLimits:
        """Limit a trajectory to so many tokens after the prompt. Raises ValueError for a number below 1."""
        return RolloutLimits(
            max_turns=self.max_turns,
            max_turn_tokens=self.max_turn_tokens,
            max_observation_tokens=self.max_observation_tokens,
            max_trajectory_tokens=max_trajectory_tokens,
            top_k=self.search_top_k,
        )

    def tag_protocol(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None
    ) -> TagProtocol:
        """Make the protocol of that name; with `chat`, the chat template's frame replaces its `message_frame`.

        `template_kwargs` go to that template, as the trainer's `chat_template_kwargs` do for prompts.

        Raises ValueError if the chat template does not show both sides of a conversation.
        """
        protocol = PROTOCOLS[self.protocol]
        return protocol.in_chat(tokenizer, template_kwargs) if self.chat else protocol
