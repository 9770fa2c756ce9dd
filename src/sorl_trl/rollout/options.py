"""Options of a rollout: the limits of a trajectory, the engine, the prompt and the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from transformers import PreTrainedTokenizerBase

from sorl_trl.checks import (
    COUNT,
    POSITIVE_COUNT,
    SWITCH,
    Number,
    OneOf,
    check_fields,
    factory_named,
    import_named,
)
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
    """What acts, the prompt, the protocol, and all limits of a trajectory except its total number of tokens.

    By default the policy acts in a search engine, and otherwise in the `environment`, or as the `agent` has it act.

    Raises ValueError if a value is not allowed, or both are given.
    """

    environment: str | None = field(
        default=None,
        metadata={
            "help": "Dotted path of your own environment in place of a search engine, such as my_module.MyGame: a "
            "class with a method `step`, or a function that makes one. Its `protocol` reads the policy's turns."
        },
    )
    agent: str | None = field(
        default=None,
        metadata={
            "help": "Dotted path of your own `rollout_func`, as TRL's trainers take it, which makes whole "
            "trajectories. It is for training alone."
        },
    )

    prompt_template: str = field(
        default=SEARCH_R1_TEMPLATE, metadata={"help": "Prompt, with `{question}` in place of the question."}
    )
    chat: Annotated[bool, SWITCH] = field(
        default=False, metadata={"help": "Ask through the tokenizer's chat template instead of in plain text."}
    )
    protocol: Annotated[str, OneOf(tuple(PROTOCOLS))] = field(
        default="search_r1",
        metadata={"help": "Wording of observations: 'search_r1', or 'terse', with shorter ones for small policies."},
    )
    max_turns: Annotated[int, COUNT] = field(
        default=2, metadata={"help": "Turns that search, call a tool or are invalid, before the last generation."}
    )
    max_turn_tokens: Annotated[int, POSITIVE_COUNT] = field(default=500, metadata={"help": "Tokens of one turn."})
    max_observation_tokens: Annotated[int, POSITIVE_COUNT] = field(
        default=500, metadata={"help": "Tokens of one observation, including tags."}
    )
    search_top_k: Annotated[int, POSITIVE_COUNT] = field(default=3, metadata={"help": "Passages per search."})

    def __post_init__(self) -> None:
        check_fields(self)
        if self.environment:
            if self.agent:
                raise ValueError(f"`environment` is {self.environment!r} and `agent` {self.agent!r}: name one.")
            factory_named("environment", self.environment, "step")
        if self.agent and not callable(import_named("agent", self.agent)):
            raise ValueError(f"`agent` is {self.agent!r}, but must name a function that TRL takes as `rollout_func`.")
        if "{question}" not in self.prompt_template:
            raise ValueError(f"`prompt_template` is {self.prompt_template!r}, but must hold '{{question}}'.")

    @property
    def searches(self) -> bool:
        """Whether a search engine answers the policy, because nothing of the user's own does."""
        return not (self.environment or self.agent)

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

    def check_template(self, tokenizer: PreTrainedTokenizerBase, conversational: bool = False) -> None:
        """Raise ValueError if prompts are messages, by `chat` or as they stand, and there is no chat template."""
        if tokenizer.chat_template is None and (self.chat or conversational):
            reason = "`chat` is True" if self.chat else "prompts are messages"
            raise ValueError(f"{reason}, but the policy's tokenizer has no chat template: name a chat model.")
