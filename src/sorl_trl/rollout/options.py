"""Options of a rollout: the limits of a trajectory, the engine, the prompt and the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Annotated, Any

from transformers import PreTrainedTokenizerBase

from sorl_trl.checks import (
    COUNT,
    POSITIVE_COUNT,
    SWITCH,
    Checked,
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
ACTORS = ("environment", "agent", "agent_command", "rollout_func")
"""Arguments that name what acts in place of a search engine."""

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
class RolloutLimits(Checked):
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
class EngineOptions(Checked):
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


@dataclass
class RolloutArguments:
    """What acts, the prompt, the protocol, and all limits of a trajectory except its total number of tokens.

    By default the policy acts in a search engine. Otherwise it acts in the `environment`, or answers the API calls of
    the `agent` or the `agent_command`, or does what the `rollout_func` has it do.

    Raises ValueError if a value is not allowed, or several of these are given.
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
            "help": "Path of your own agent, such as my_module.agent: a function `agent(example, endpoint)`, plain or "
            "async, that makes API calls to the policy, and may return its reward."
        },
    )
    agent_command: str | None = field(
        default=None,
        metadata={
            "help": "A command that makes the API calls of one trajectory, such as 'python my_agent.py'. It finds the "
            "policy in OPENAI_BASE_URL and OPENAI_API_KEY, reads the example as JSON from standard input, and writes "
            "its reward as the last line of standard output."
        },
    )
    rollout_func: str | None = field(
        default=None,
        metadata={
            "help": "Dotted path of your own `rollout_func`, as TRL's trainers take it, which makes whole "
            "trajectories. It is for training alone."
        },
    )
    agent_time_limit_s: Annotated[float, POSITIVE] = field(
        default=600.0,
        metadata={"help": "Seconds that the agent may take for one trajectory, which is masked if it takes longer."},
    )
    reward_on_error: Annotated[float, Number()] = field(
        default=0.0, metadata={"help": "Reward of a trajectory in which the agent raised an error."}
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
    max_turn_tokens: Annotated[int, POSITIVE_COUNT] = field(
        default=500, metadata={"help": "Tokens of one turn; with an agent, of the reply to one API call."}
    )
    max_observation_tokens: Annotated[int, POSITIVE_COUNT] = field(
        default=500, metadata={"help": "Tokens of one observation, including tags."}
    )
    search_top_k: Annotated[int, POSITIVE_COUNT] = field(default=3, metadata={"help": "Passages per search."})

    def __post_init__(self) -> None:
        check_fields(self)
        given = [f"`{name}` is {value!r}" for name in ACTORS if (value := getattr(self, name))]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: name one.")
        if self.environment:
            factory_named("environment", self.environment, "step")
        if self.agent:
            _check_agent(self.agent)
        if self.rollout_func and not callable(import_named("rollout_func", self.rollout_func)):
            raise ValueError(
                f"`rollout_func` is {self.rollout_func!r}, but must name a function that TRL's trainers take."
            )
        if "{question}" not in self.prompt_template:
            raise ValueError(f"`prompt_template` is {self.prompt_template!r}, but must hold '{{question}}'.")

    @property
    def searches(self) -> bool:
        """Whether a search engine answers the policy, because nothing of the user's own does."""
        return self.actor is None

    @property
    def has_agent(self) -> bool:
        """Whether an agent of the user's own makes API calls to the policy."""
        return bool(self.agent or self.agent_command)

    @property
    def actor(self) -> str | None:
        """What of the user's own acts in place of a search engine."""
        return next((value for name in ACTORS if (value := getattr(self, name))), None)

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
        """Raise ValueError if prompts are messages, by `chat` or as they stand, and there is no chat template.

        API calls of an agent are messages, too.
        """
        if tokenizer.chat_template is None and (self.chat or conversational or self.has_agent):
            reason = "`chat` is True" if self.chat else "prompts are messages"
            if self.has_agent:
                reason = "the agent's API calls are messages"
            raise ValueError(f"{reason}, but the policy's tokenizer has no chat template: name a chat model.")


def _check_agent(path: str) -> None:
    """Raise ValueError unless a path names what can be called with an example and an endpoint."""
    agent = import_named("agent", path)
    try:
        parameters = signature(agent).bind({}, None).signature.parameters
    except (TypeError, ValueError):
        raise ValueError(
            f"`agent` is {path!r}, but must name a function that takes an example and an endpoint."
        ) from None
    if "trainer" in parameters or next(iter(parameters)) == "prompts":
        raise ValueError(f"`agent` is {path!r}, which takes prompts and a trainer: name it as `rollout_func`.")
