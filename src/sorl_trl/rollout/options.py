"""Options of a rollout: the limits of a trajectory, the engine, the prompt and the protocol."""

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
"""Protocols by name, as recipes use them. "terse" suits tiny policies, which copy best from short observations."""


@dataclass(frozen=True)
class RolloutLimits:
    """Limits one trajectory, in turns and in tokens. The defaults are those of Search-R1's `train_ppo.sh`.

    Raises ValueError if a limit is out of range.
    """

    max_turns: Annotated[int, COUNT] = 2
    """Turns that may search or be invalid. One last generation, which cannot search, follows them."""
    max_turn_tokens: Annotated[int, POSITIVE_COUNT] = 500
    max_observation_tokens: Annotated[int, POSITIVE_COUNT] = 500
    """Tokens of an observation, including its frame."""
    max_trajectory_tokens: Annotated[int | None, POSITIVE_COUNT] = None
    """Tokens after the prompt, including observations. None takes the trainer's `max_completion_length`, or sets no
    limit if there is no trainer."""
    top_k: Annotated[int, POSITIVE_COUNT] = 3
    """Passages per query."""

    def __post_init__(self) -> None:
        check_fields(self)

    def within(self, max_completion_length: int) -> RolloutLimits:
        """The limits under a trainer. Raises ValueError if they allow more than `max_completion_length` tokens."""
        if self.max_trajectory_tokens is None:
            return replace(self, max_trajectory_tokens=max_completion_length)
        if self.max_trajectory_tokens > max_completion_length:
            raise ValueError(
                f"`limits.max_trajectory_tokens` is {self.max_trajectory_tokens}, more than the trainer's "
                f"`max_completion_length` of {max_completion_length}. Lower the first or raise the second."
            )
        return self


@dataclass(frozen=True)
class EngineOptions:
    """How turns are generated, and when replies rejoin them. No option changes the sampled distribution.

    `rollout_engine` and `kv_cache_gib` apply to transformers models; vLLM has its own engine. In lock-step, every
    turn waits for all replies, as with `rejoin_after=0`.

    Raises ValueError if a value is not allowed.
    """

    rollout_engine: Annotated[str, OneOf(ENGINES)] = field(
        default="auto",
        metadata={
            "help": "Engine without vLLM. 'slots' computes each token once and lets each row advance by itself; "
            "'lockstep' calls `model.generate` for whole turns. 'auto' takes slots on a CPU if they serve the model "
            "exactly, and otherwise logs why not; on a GPU they are slower."
        },
    )
    rejoin_after: Annotated[int, COUNT] = field(
        default=32,
        metadata={
            "help": "After how many engine steps a row continues with the reply to its turn, even if the reply came "
            "sooner or has to be waited for. Set it to about what a slow search takes (`benchmarks.rollout`)."
        },
    )
    kv_cache_gib: Annotated[float | None, POSITIVE] = field(
        default=None,
        metadata={
            "help": "GiB for the keys and values of 'slots'; with less, fewer trajectories generate at once. By "
            "default, three fifths of the free memory on a GPU, or half of the available memory on a CPU."
        },
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass
class RolloutArguments:
    """The prompt, the protocol, and all limits of a trajectory except its total number of tokens.

    Raises ValueError if a value is not allowed.
    """

    prompt_template: str = field(
        default=SEARCH_R1_TEMPLATE, metadata={"help": "Prompt, with `{question}` in place of the question."}
    )
    chat: Annotated[bool, SWITCH] = field(
        default=False, metadata={"help": "Ask through the tokenizer's chat template instead of in plain text."}
    )
    protocol: Annotated[str, OneOf(tuple(PROTOCOLS))] = field(
        default="search_r1",
        metadata={
            "help": "Wording of prompts and observations: 'search_r1', or 'terse' for small policies, which shortens "
            "observations and, for the leaderboard's tasks, lists each function in one line."
        },
    )
    max_turns: Annotated[int, COUNT] = field(
        default=2,
        metadata={
            "help": "Searches and invalid actions before the last generation, by default 2. For the leaderboard's "
            "tasks, messages, by default as many as the longest task may take: 21 per request."
        },
    )
    max_turn_tokens: Annotated[int, POSITIVE_COUNT] = field(default=500, metadata={"help": "Tokens of one turn."})
    max_observation_tokens: Annotated[int, POSITIVE_COUNT] = field(
        default=500, metadata={"help": "Tokens of one observation, including tags."}
    )
    search_top_k: Annotated[int, POSITIVE_COUNT] = field(default=3, metadata={"help": "Passages per search."})

    def __post_init__(self) -> None:
        check_fields(self)
        if "{question}" not in self.prompt_template:
            raise ValueError(f"`prompt_template` is {self.prompt_template!r}, but must hold '{{question}}'.")

    @property
    def is_terse(self) -> bool:
        """Whether prompts and observations are worded for a small policy."""
        return self.protocol == "terse"

    def limits(self, max_trajectory_tokens: int) -> RolloutLimits:
        """The limits, with `max_trajectory_tokens` after the prompt. Raises ValueError if that is below 1."""
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
        """The named protocol; with `chat`, the chat template's frame replaces its `message_frame`.

        `template_kwargs` are passed to that template, as the trainer's `chat_template_kwargs` are for prompts.

        Raises ValueError if the chat template does not show both sides of a conversation.
        """
        protocol = PROTOCOLS[self.protocol]
        return protocol.in_chat(tokenizer, template_kwargs) if self.chat else protocol

    def check_template(self, tokenizer: PreTrainedTokenizerBase, of_tasks: bool) -> None:
        """Raise ValueError if prompts are messages, by `chat` or because they are tasks, without a chat template."""
        if tokenizer.chat_template is None and (self.chat or of_tasks):
            asked = "tasks are conversations" if of_tasks else "`chat` is True"
            instead = "" if of_tasks else " set `chat` to false, or"
            raise ValueError(f"{asked}, but the policy's tokenizer has no chat template:{instead} name a chat model.")
