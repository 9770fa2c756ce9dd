"""Options of a rollout: the limits of a trajectory, the engine, the prompt and the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Annotated

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
ACTORS = ("environment", "agent", "agent_command")
"""Arguments that replace the search engine."""

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
"""Protocols by name, for recipes. "terse" suits tiny policies, which copy best from short observations."""


@dataclass(frozen=True)
class RolloutLimits(Checked):
    """Limits of one trajectory, in turns and tokens. The defaults are those of Search-R1's `train_ppo.sh`.

    Raises ValueError if a limit is out of range.
    """

    max_turns: Annotated[int, COUNT] = 2
    """Turns that may search or be invalid, before one last generation, which cannot search."""
    max_turn_tokens: Annotated[int, POSITIVE_COUNT] = 500
    max_observation_tokens: Annotated[int, POSITIVE_COUNT] = 500
    """Tokens of an observation, including its frame."""
    max_trajectory_tokens: Annotated[int | None, POSITIVE_COUNT] = None
    """Tokens after the prompt, including observations. None: the trainer's `max_completion_length`, or no limit
    without a trainer."""
    top_k: Annotated[int, POSITIVE_COUNT] = 3
    """Passages per query."""

    def within(self, max_completion_length: int) -> RolloutLimits:
        """The limits under a trainer. Raises ValueError if they allow more than `max_completion_length` tokens."""
        if self.max_trajectory_tokens is None:
            return replace(self, max_trajectory_tokens=max_completion_length)
        if self.max_trajectory_tokens > max_completion_length:
            raise ValueError(
                f"`limits.max_trajectory_tokens` is {self.max_trajectory_tokens}, but must not exceed the trainer's "
                f"`max_completion_length` of {max_completion_length}. Lower the former or raise the latter."
            )
        return self


@dataclass(frozen=True)
class EngineOptions(Checked):
    """How turns are generated, and when rows continue with replies. No option changes the sampled distribution.

    `rollout_engine` and `kv_cache_gib` apply to transformers models; vLLM has its own engine. In lock-step, every
    turn waits for all replies, as with `rejoin_after=0`.

    Raises ValueError if a value is not allowed.
    """

    rollout_engine: Annotated[str, OneOf(ENGINES)] = field(
        default="auto",
        metadata={
            "help": "The engine without vLLM. 'slots' keeps the KV cache between turns, and each row advances "
            "independently; 'lockstep' calls `model.generate` for whole turns. 'auto' is 'slots' on a CPU if it "
            "reproduces the model exactly, and else 'lockstep', with the reason logged; on a GPU, slots are slower."
        },
    )
    rejoin_after: Annotated[int, COUNT] = field(
        default=32,
        metadata={
            "help": "After how many engine steps a row continues with the reply to its turn, even if the reply came "
            "sooner or must be waited for. Set it to about the duration of a slow search (`benchmarks.rollout`)."
        },
    )
    kv_cache_gib: Annotated[float | None, POSITIVE] = field(
        default=None,
        metadata={
            "help": "GiB for the KV cache of 'slots'; with less, fewer trajectories generate at once. Default: three "
            "fifths of the free memory on a GPU, or half of the available memory on a CPU."
        },
    )


@dataclass
class RolloutArguments:
    """The actor, the prompt, the protocol, and all limits of a trajectory except its total number of tokens.

    By default, the policy uses a search engine. Otherwise, it acts in the `environment`, or answers the API calls of
    the `agent` or the `agent_command`.

    Raises ValueError if a value is not allowed, or more than one of these is given.
    """

    environment: str | None = field(
        default=None,
        metadata={
            "help": "Dotted path of your own environment, used instead of a search engine, such as my_module.MyGame: "
            "a class with a method `step`, or a function that makes one. Its `protocol`, if any, parses the policy's "
            "turns."
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
            "help": "A command that makes the API calls of one trajectory, such as 'python my_agent.py'. It reaches "
            "the policy through OPENAI_BASE_URL and OPENAI_API_KEY, or their ANTHROPIC_ twins, reads the example as "
            "JSON from standard input, and writes its reward as the last line of standard output."
        },
    )
    agent_time_limit_s: Annotated[float, POSITIVE] = field(
        default=600.0,
        metadata={
            "help": "Time limit in seconds for the agent per trajectory. A trajectory that takes longer is masked."
        },
    )
    reward_on_error: Annotated[float, Number()] = field(
        default=0.0, metadata={"help": "Reward of a trajectory if the agent raises an error."}
    )

    prompt_template: str = field(
        default=SEARCH_R1_TEMPLATE, metadata={"help": "Prompt, with `{question}` where the question goes."}
    )
    chat: Annotated[bool, SWITCH] = field(
        default=False, metadata={"help": "Format prompts with the tokenizer's chat template instead of as plain text."}
    )
    protocol: Annotated[str, OneOf(tuple(PROTOCOLS))] = field(
        default="search_r1",
        metadata={
            "help": "Wording of observations: 'search_r1', or 'terse' for shorter ones that suit small policies."
        },
    )
    max_turns: Annotated[int, COUNT] = field(
        default=2,
        metadata={"help": "The most turns that search, call a tool or are invalid, before one last generation."},
    )
    max_turn_tokens: Annotated[int, POSITIVE_COUNT] = field(
        default=500, metadata={"help": "The most tokens of one turn; with an agent, of the reply to one API call."}
    )
    max_observation_tokens: Annotated[int, POSITIVE_COUNT] = field(
        default=500, metadata={"help": "The most tokens of one observation, including tags."}
    )
    search_top_k: Annotated[int, POSITIVE_COUNT] = field(default=3, metadata={"help": "Passages per search."})

    def __post_init__(self) -> None:
        check_fields(self)
        given = [f"`{name}` is {value!r}" for name in ACTORS if (value := getattr(self, name))]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: set only one.")
        if self.environment:
            factory_named("environment", self.environment, "step")
        if self.agent:
            _check_agent(self.agent)
        if "{question}" not in self.prompt_template:
            raise ValueError(f"`prompt_template` is {self.prompt_template!r}, but must contain '{{question}}'.")

    @property
    def searches(self) -> bool:
        """Whether a search engine answers the policy, because nothing else was given."""
        return self.actor is None

    @property
    def has_agent(self) -> bool:
        """Whether the user's own agent makes API calls to the policy."""
        return bool(self.agent or self.agent_command)

    @property
    def actor(self) -> str | None:
        """The name of the argument that replaces the search engine, if any."""
        return next((value for name in ACTORS if (value := getattr(self, name))), None)

    def limits(self, max_trajectory_tokens: int | None) -> RolloutLimits:
        """The limits, with at most `max_trajectory_tokens` after the prompt. Raises ValueError if that is below 1."""
        return RolloutLimits(
            max_turns=self.max_turns,
            max_turn_tokens=self.max_turn_tokens,
            max_observation_tokens=self.max_observation_tokens,
            max_trajectory_tokens=max_trajectory_tokens,
            top_k=self.search_top_k,
        )

    def check_template(self, tokenizer: PreTrainedTokenizerBase, conversational: bool = False) -> None:
        """Raise ValueError if prompts are messages, through `chat` or in the data, and there is no chat template.

        An agent's API calls are messages, too.
        """
        if tokenizer.chat_template is None and (self.chat or conversational or self.has_agent):
            reason = "`chat` is True" if self.chat else "prompts are messages"
            if self.has_agent:
                reason = "the agent's API calls are messages"
            raise ValueError(f"{reason}, but the policy's tokenizer has no chat template: use a chat model.")


def _check_agent(path: str) -> None:
    """Raise ValueError unless a path names a function of an example and an endpoint."""
    agent = import_named("agent", path)
    try:
        parameters = signature(agent).bind({}, None).signature.parameters
    except (TypeError, ValueError):
        raise ValueError(
            f"`agent` is {path!r}, but must name a function that takes an example and an endpoint."
        ) from None
    if "trainer" in parameters or next(iter(parameters)) == "prompts":
        raise ValueError(f"`agent` is {path!r}, which takes prompts and a trainer: pass it to the trainer, in Python.")
