"""`EndpointRollout`: a `rollout_func` that makes trajectories of the API calls of a user's agent."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any

from trl import GRPOTrainer
from trl.data_utils import is_conversational

from sorl_trl.agents.chat import RolloutSetup
from sorl_trl.agents.policy_rollout import MESSAGES, PolicyRollout, rollout_output
from sorl_trl.checks import POSITIVE_COUNT, Number
from sorl_trl.endpoint.agents import Access, Agent, AgentMistake, CommandError, Outcome, run_agent
from sorl_trl.endpoint.conversation import EXTENDED, NEW_CONTEXT, SPLICED, Conversation
from sorl_trl.endpoint.messages import ChatFormat
from sorl_trl.endpoint.server import CallLimits, Endpoint, Run, check_installed
from sorl_trl.endpoint.turns import TurnQueue
from sorl_trl.rollout import Engine, EngineOptions, RolloutLimits, rollout_statistics
from sorl_trl.text import one_line
from sorl_trl.types import StopReason, Trajectory

logger = logging.getLogger(__name__)

_CAUSES = {
    "template": "the chat template renders earlier messages differently, for example without thoughts. The policy "
    "will see the same prompts in production. To keep thoughts, call `add_response_schema(tokenizer)` and then set "
    "`tokenizer.chat_template` to `get_training_chat_template(tokenizer)`, both of `trl.chat_template_utils`",
    "client": "the agent's client changes the policy's messages before sending them back, for example tool calls into "
    "text. Use a kind of agent that sends back `tool_calls`",
    "history": "earlier messages or the tools change from call to call, for example because they contain the time. "
    "Leave them unchanged, and append new messages",
}
_HARDLY_ANY = 8
"""With at most this many new contexts, no warning is given."""


def agent_reward(
    completions: Sequence[Any], agent_rewards: Sequence[Any] | None = None, **_: Any
) -> list[float | None]:
    """The reward function for agents that return their rewards: the sum for each trajectory, None if there is none.

    Raises ValueError unless an `EndpointRollout` made the trajectories.
    """
    if agent_rewards is None:
        raise ValueError("`agent_reward` needs trajectories of an `EndpointRollout`, which passes on `agent_rewards`.")
    if all(each is None for each in agent_rewards):
        _warn_once("No agent returned a reward for `agent_reward` to pass on. Does the agent end with `return`?")
    return [None if each is None else sum(each.values()) for each in agent_rewards]


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)


class EndpointRollout(PolicyRollout):
    """A `rollout_func` that runs your agent on each row of the dataset, with the policy behind an API.

    ```python
    async def agent(example, endpoint):
        client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        ...  # your agent's code
        return reward

    trainer = SOGRPOTrainer(model, agent_reward, args, dataset, rollout_func=EndpointRollout(agent))
    ```

    Each API call is a turn. What the policy read and sampled is kept as token ids: a call extends the context that it
    continues; if its history has changed, it begins a new context of the same trajectory. All agents of a rollout run
    at the same time.

    Besides the keys of `AgentRollout`, it returns `context_ids` and, for reward functions, `agent_rewards`: for each
    agent, a mapping of the rewards that it returned, or None. For conversational prompts, completions are messages.
    Metrics of contexts and errors are logged as `endpoint/…`, and rewards that an agent names as `agent/…`.

    Args:
        agent: A coroutine function, a function, or the result of `command_agent`. It gets a row of the dataset and an
            object with `base_url` and `api_key`, and returns a number, a dict of numbers, or None.
        max_turn_tokens: The most tokens of a turn. Default: the trainer's `max_completion_length`, which limits
            everything after a trajectory's first prompt, except tokens that contexts repeat.
        time_limit_s: How long an agent may take before its trajectory is masked.
        reward_on_error: The reward of an agent that raises an error. The usual cause is the policy, for example a turn
            that was cut off and cannot be parsed. If a connection was lost, the trajectory is masked instead. An error
            before an agent's first call is a bug in the agent and is raised here.
        host: The address at which the endpoint listens and agents connect.
        engine: How turns are generated, and when agents' next calls are taken up.

    Raises TypeError for an `agent` that is not callable, and ValueError for other invalid arguments.
    """

    def __init__(
        self,
        agent: Agent,
        max_turn_tokens: int | None = None,
        time_limit_s: float = 600.0,
        reward_on_error: float = 0.0,
        host: str = "127.0.0.1",
        engine: EngineOptions | None = None,
    ) -> None:
        super().__init__(engine)
        if not callable(agent):
            raise TypeError(f"agent is {agent!r}, but must be a function `agent(example, endpoint)`")
        POSITIVE_COUNT.check("max_turn_tokens", max_turn_tokens, or_none=True)
        Number(above=0).check("time_limit_s", time_limit_s)
        Number().check("reward_on_error", reward_on_error)
        self.agent, self.max_turn_tokens, self.host = agent, max_turn_tokens, host
        self.time_limit_s, self.reward_on_error = time_limit_s, reward_on_error
        self._rewards: list[Mapping[str, float] | None] = []
        self._warned: set[str] = set()

    def check(self, config: Any, tools: Any = None, environment_factory: Any = None) -> None:
        super().check(config, tools, environment_factory)
        check_installed()
        if config.max_tool_calling_iterations is not None:
            raise ValueError(
                f"`max_tool_calling_iterations` is {config.max_tool_calling_iterations}, but applies only to TRL's "
                "tool loop: the agent decides how often it makes calls."
            )
        most = self.max_turn_tokens
        if most is not None and most > config.max_completion_length:
            raise ValueError(
                f"`max_turn_tokens` is {most}, but must not exceed the trainer's `max_completion_length` of "
                f"{config.max_completion_length}. Lower the former or raise the latter."
            )

    def setup(self, trainer: GRPOTrainer) -> RolloutSetup:
        """What the rollout needs from a trainer. The chat template is the tokenizer's, as in production.

        Raises TypeError for TRL's own trainers, and ValueError if there is no chat template.
        """
        if not hasattr(trainer, "rollout_examples"):
            raise TypeError(
                f"`EndpointRollout` needs a `SOGRPOTrainer` or `SOPPOTrainer`: {type(trainer).__name__} supports "
                "neither dataset rows in rollouts nor contexts"
            )
        most = int(trainer.args.max_completion_length)
        limits = RolloutLimits(sys.maxsize, self.max_turn_tokens or most, most, most)
        options = trainer.chat_template_kwargs
        setup = RolloutSetup(trainer.processing_class, None, options, trainer.eos_token_ids, limits)
        ChatFormat.of(setup)
        return setup

    def measures(self, row: int) -> Mapping[str, float | None]:
        rewards = self._rewards[row]
        return {} if rewards is None else {**rewards, "reward": sum(rewards.values())}

    def collect(
        self,
        setup: RolloutSetup,
        prompts: Sequence[Any],
        examples: Sequence[Mapping[str, Any]],
        engine: Engine,
        any_active: Callable[[bool], bool] = bool,
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """See `PolicyRollout.collect`.

        Raises AgentMistake, a ValueError, if an agent sends an unsupported request or returns something other than
        rewards, and RuntimeError if an agent raises an error before its first call.
        """
        began = time.perf_counter()
        queue = TurnQueue(len(examples), self.engine.rejoin_after)
        try:
            engine.open(len(examples))
            runs, outcomes = self._run(setup, examples, engine, queue, any_active)
        finally:
            engine.close()
        self._check(runs, outcomes)
        self._rewards = [{"reward": self.reward_on_error} if each.failure else each.rewards for each in outcomes]
        trajectories = [
            run.conversation.trajectory(_stop_reason(run, outcome))
            for run, outcome in zip(runs, outcomes, strict=True)
        ]
        output = rollout_output(
            trajectories, setup.tokenizer.eos_token_id, engine.window, contexts=True, routes=engine.routes
        )
        output["agent_rewards"] = [*self._rewards]
        if is_conversational({"prompt": prompts[0]}):
            output[MESSAGES] = [run.conversation.completion() for run in runs]
        times = {"seconds_generating": queue.seconds_generating, "seconds_waiting": queue.seconds_waiting}
        sampled = sum(len(turn.token_ids) for each in trajectories for turn in each.turns)
        times["tokens_per_second"] = sampled / (time.perf_counter() - began)
        return output, self._metrics(runs, outcomes, trajectories, times)

    def _run(
        self,
        setup: RolloutSetup,
        examples: Sequence[Mapping[str, Any]],
        engine: Engine,
        queue: TurnQueue,
        any_active: Callable[[bool], bool],
    ) -> tuple[list[Run], list[Outcome]]:
        """Run all agents to their end, and generate turns for their requests."""
        with _STARTING:
            endpoint = _endpoint(self.host)
        chat, size = ChatFormat.of(setup), len(examples)
        most = setup.limits.max_trajectory_tokens
        limits = CallLimits(setup.limits.max_turn_tokens, most, engine.window)
        conversations = [Conversation(chat, i, size) for i in range(size)]
        runs = [Run(i, each, queue, limits, engine.constrains, self._warned) for i, each in enumerate(conversations)]
        endpoint.admit(runs)
        outcomes: list[Future[Outcome]] = []
        try:
            for run, example in zip(runs, examples, strict=True):
                access = Access(endpoint.base_url, run.key)
                outcomes.append(run_agent(self.agent, example, access, self.time_limit_s, run.end))
            queue.serve(engine, any_active)
        except BaseException:
            for outcome in outcomes:
                outcome.cancel()  # nobody waits for the agents
            raise
        finally:
            endpoint.dismiss(runs)
        return runs, [outcome.result() for outcome in outcomes]

    def _check(self, runs: Sequence[Run], outcomes: Sequence[Outcome]) -> None:
        """Raise mistakes in the agent's code, and warn once of errors that the policy caused."""
        for run in runs:
            if run.failure is not None:
                raise RuntimeError(f"The endpoint failed: {run.failure!r}") from run.failure
            if run.refusal is not None:
                raise AgentMistake(f"The endpoint refused a request of the agent: {run.refusal}.") from run.refusal
        failures = [(run, each.failure) for run, each in zip(runs, outcomes, strict=True) if each.failure]
        for run, error in failures:
            if isinstance(error, AgentMistake):
                raise error
            if not run.conversation.answers and run.limit_reached is None:
                if isinstance(error, CommandError):
                    raise AgentMistake(f"Before its first call, {error}") from error
                raised = f"{type(error).__name__}: {one_line(error)}"
                raise RuntimeError(f"The agent raised before its first call: {raised}") from error
        has_called = any(run.conversation.answers for run in runs)
        if not has_called and not any(each.is_late or each.error for each in outcomes):
            _warn_once("No agent called the policy. Does it use `endpoint.base_url` and `endpoint.api_key`?")
        if failures:
            logger.warning(
                "%d of %d agents raised an error and get `reward_on_error` (%g). The first error: %s",
                *(len(failures), len(runs), self.reward_on_error, one_line(repr(failures[0][1]))[:500]),
            )

    def _metrics(
        self,
        runs: Sequence[Run],
        outcomes: Sequence[Outcome],
        trajectories: Sequence[Trajectory],
        times: Mapping[str, float],
    ) -> dict[str, float]:
        size = len(runs)
        statistics = {**rollout_statistics(trajectories), **times}
        statistics["neutralized_per_trajectory"] += sum(run.conversation.neutralized for run in runs) / size
        metrics = {f"rollout/{name}": value for name, value in statistics.items()}
        counts = sum((run.conversation.counts for run in runs), Counter[str]())
        self._warn_of_new_contexts(counts, sum((run.conversation.causes for run in runs), Counter[str]()))
        for kind in (EXTENDED, SPLICED, NEW_CONTEXT):
            metrics[f"endpoint/{kind}"] = counts[kind] / size
        metrics["endpoint/resent"] = sum(run.resent for run in runs) / size
        metrics["endpoint/error_share"] = sum(each.failure is not None for each in outcomes) / size
        named: dict[str, list[float]] = {}
        for outcome in outcomes:
            for name, value in (outcome.rewards or {}).items():
                named.setdefault(name, []).append(value)
        if set(named) - {"reward"}:
            metrics |= {f"agent/{name}": sum(values) / len(values) for name, values in named.items()}
        return metrics

    def _warn_of_new_contexts(self, counts: Counter[str], causes: Counter[str]) -> None:
        """Warn once if most calls that continue a conversation begin a new context, and why."""
        afresh, continued = sum(causes.values()), counts[EXTENDED] + counts[SPLICED]
        if afresh < _HARDLY_ANY or afresh <= continued:
            return
        (cause, _), *_ = causes.most_common(1)
        if cause not in self._warned:
            self._warned.add(cause)
            logger.warning(
                "%d of %d API calls that continue a conversation began a new context, which costs time and memory: %s",
                *(afresh, afresh + continued, _CAUSES[cause]),
            )


_STARTING = threading.Lock()
"""Concurrent rollouts share the endpoint."""


@cache
def _endpoint(host: str) -> Endpoint:
    """This process's endpoint at an address."""
    return Endpoint(host)


def _stop_reason(run: Run, outcome: Outcome) -> StopReason:
    """Why a trajectory ended. A limit that cut its last turn or left no room for another takes precedence."""
    if outcome.is_lost:
        return StopReason.ENVIRONMENT_UNAVAILABLE
    answers = run.conversation.answers
    if run.limit_reached is not None:
        return run.limit_reached
    if answers and answers[-1].finish_reason == "length":
        return StopReason.TURN_LIMIT
    return StopReason.AGENT_ERROR if outcome.error is not None else StopReason.ENVIRONMENT_DONE
