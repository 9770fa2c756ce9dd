"""`EndpointRollout`: a `rollout_func` that makes trajectories of the API calls of a user's agent."""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache, partial
from typing import Any

from trl import GRPOTrainer
from trl.data_utils import is_conversational

from sorl_trl.checks import POSITIVE_COUNT, Number
from sorl_trl.endpoint.agents import Access, Agent, AgentMistake, Outcome, described, run_agent
from sorl_trl.endpoint.conversation import EXTENDED, NEW_CONTEXT, SPLICED, Conversation
from sorl_trl.endpoint.messages import ChatFormat
from sorl_trl.endpoint.run import CallLimits, Run
from sorl_trl.endpoint.server import Endpoint, check_installed
from sorl_trl.rollout import Engine, EngineOptions, RolloutLimits, rollout_statistics
from sorl_trl.rollout.chat import RolloutSetup
from sorl_trl.rollout.policy_rollout import MESSAGES, PolicyRollout, with_columns
from sorl_trl.rollout.turns import ApiTurns
from sorl_trl.threads import made_once
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
_FULL = {StopReason.TRAJECTORY_LIMIT, StopReason.CONTEXT_LIMIT}
_MASKED = {
    "lost": "exceeded `time_limit_s` or lost a connection",
    "broken": "raised an error before its first call, or one of its event loop",
    "uncalled": "ended without a call to the policy",
}
"""What agents did whose trajectories are masked."""
_UNCALLED = (
    "Does the agent use `endpoint.base_url` and `endpoint.api_key`? If a cache answered, turn it off: "
    "`dspy.LM(cache=False)`, `litellm.cache = None`, LangChain's `set_llm_cache(None)`."
)
_HARDLY_ANY = 8
"""With at most this many new contexts, no warning is given."""


def agent_reward(
    completions: Sequence[Any],
    agent_rewards: Sequence[Any] | None = None,
    trajectory: Sequence[Trajectory] = (),
    **_: Any,
) -> list[float | None]:
    """The reward function for agents that return their rewards: the sum for each trajectory, None if there is none.

    Raises ValueError unless an `EndpointRollout` made the trajectories.
    """
    if agent_rewards is None:
        raise ValueError("`agent_reward` needs trajectories of an `EndpointRollout`, which passes on `agent_rewards`.")
    pairs = zip(agent_rewards, trajectory, strict=False)
    kept = [each for each, made in pairs if not made.stop_reason.is_infrastructure_failure]
    if kept and all(each is None for each in kept):
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

    Besides the keys of `AgentRollout`, it returns `context_ids`, if a trajectory has several contexts, and, for reward
    functions, `agent_rewards`: for each agent, a mapping of the rewards that it returned, or None. For conversational
    prompts, completions are messages. Metrics of contexts and errors are logged as `endpoint/…`, and rewards that an
    agent names as `agent/…`.

    Args:
        agent: A coroutine function, a function, or the result of `command_agent`. It gets a row of the dataset and an
            object with `base_url` and `api_key`, and returns a number, a dict of numbers, or None.
        max_turn_tokens: The most tokens of a turn. Default: the trainer's `max_completion_length`, which limits
            everything after a trajectory's first prompt, except tokens that contexts repeat.
        time_limit_s: How long an agent may take before its trajectory is masked.
        reward_on_error: The reward of an agent that raises an error. The usual cause is the policy, for example a turn
            that was cut off and cannot be parsed. The trajectory is masked instead if a connection was lost, or if the
            error is unrelated to the policy: one before the agent's first call, or of its event loop.
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
        self._has_run = threading.Event()
        """Whether a rollout has ended well, of this object or of a fork."""

    def check(self, config: Any, tools: Any = None) -> None:
        super().check(config, tools)
        check_installed()
        if config.max_tool_calling_iterations is not None:
            raise ValueError(
                f"`max_tool_calling_iterations` is {config.max_tool_calling_iterations}, but applies only to "
                "`tools`: the agent decides how often it makes calls."
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
    ) -> tuple[list[Trajectory], dict[str, float]]:
        """See `PolicyRollout.collect`.

        Raises AgentMistake, a ValueError, if an agent sends an unsupported request or returns something other than
        rewards; in this process's first rollout, if an agent's error is unrelated to the policy, or all of several
        agents raise one with room for further calls; and in any rollout, if all agents' errors are unrelated to the
        policy, or all lost their connections before a call.
        """
        turns = ApiTurns(engine, len(examples), self.engine.rejoin_after)
        try:
            engine.open(len(examples))
            runs, outcomes = self._run(setup, examples, engine, turns, any_active)
        finally:
            engine.close()
        reasons = [*map(_stop_reason, runs, outcomes)]
        found: defaultdict[str, list[Outcome]] = defaultdict(list)
        for outcome, reason in zip(outcomes, reasons, strict=True):
            found[_kind(outcome, reason)].append(outcome)
        self._check(found, len(runs), any(run.conversation.answers for run in runs), bool(_FULL & {*reasons}))
        self._rewards = [*map(self._reward, outcomes, reasons)]
        trajectories = [run.conversation.trajectory(reason) for run, reason in zip(runs, reasons, strict=True)]
        columns: dict[str, list[Any]] = {"agent_rewards": [*self._rewards]}
        if is_conversational({"prompt": prompts[0]}):
            columns[MESSAGES] = [run.conversation.completion() for run in runs]
        statistics = rollout_statistics(trajectories) | turns.time_spent()
        metrics = self._metrics(runs, found, statistics)
        return with_columns(trajectories, **columns), metrics

    def _run(
        self,
        setup: RolloutSetup,
        examples: Sequence[Mapping[str, Any]],
        engine: Engine,
        turns: ApiTurns,
        any_active: Callable[[bool], bool],
    ) -> tuple[list[Run], list[Outcome]]:
        """Run all agents to their end, and generate turns for their requests."""
        endpoint = _endpoint(self.host)
        chat, size = ChatFormat.of(setup), len(examples)
        most = setup.limits.max_trajectory_tokens
        limits = CallLimits(setup.limits.max_turn_tokens, most, engine.window)
        conversations = [Conversation(chat, i, size) for i in range(size)]
        shared = (turns, limits, engine.constrains, turns.fail, self._warned)
        runs = [Run(i, each, *shared) for i, each in enumerate(conversations)]
        endpoint.admit(runs)
        outcomes: list[Future[Outcome]] = []
        try:
            for run, example in zip(runs, examples, strict=True):
                access = Access(endpoint.base_url, run.key)
                outcomes.append(run_agent(self.agent, example, access, self.time_limit_s, partial(_end, run)))
            turns.serve(any_active, setup.progress)
        except BaseException:
            for outcome in outcomes:
                outcome.cancel()  # nobody waits for the agents
            raise
        finally:
            endpoint.dismiss(runs)
        return runs, [outcome.result() for outcome in outcomes]

    def _reward(self, outcome: Outcome, reason: StopReason) -> Mapping[str, float] | None:
        if reason.is_infrastructure_failure:
            return None
        return outcome.rewards if outcome.failure is None else {"reward": self.reward_on_error}

    def _check(self, found: Mapping[str, list[Outcome]], size: int, has_called: bool, is_full: bool) -> None:
        """Raise errors that later rollouts would repeat, and warn of the others.

        `found` are the outcomes by kind. `has_called` is whether any agent got an answer, and `is_full` whether a
        trajectory or context was.
        """
        is_first = not self._has_run.is_set()
        broken, lost, failed = found["broken"], found["lost"], found["failed"]
        if broken and (is_first or len(broken) == size):
            where = "of its event loop" if broken[0].is_of_a_loop else "before its first call"
            raise AgentMistake(f"The agent raised an error {where}: {_first(broken)}") from broken[0].error
        if len(lost) == size and not has_called and all(each.error for each in lost):
            raise AgentMistake(
                f"All {size} agents lost a connection before their first call was answered. If a proxy is set "
                f"(HTTP_PROXY), add {self.host} to NO_PROXY. The first error: {_first(lost)}"
            ) from lost[0].error
        # A single error may be the policy's fault, and so may calls that a full trajectory or context refused.
        if is_first and len(failed) == size > 1 and not is_full:
            raise AgentMistake(f"All {size} agents raised an error. The first: {_first(failed)}") from failed[0].error
        self._has_run.set()
        for kind in filter(found.get, _MASKED):
            detail = _UNCALLED if kind == "uncalled" else f"The first error: {_first(found[kind])}"
            why = f"{_MASKED[kind]}, so their trajectories are masked"
            self._warn(kind, "%d of %d agents %s. %s", len(found[kind]), size, why, detail)
        if failed:
            logger.warning(
                "%d of %d agents raised an error and get `reward_on_error` (%g). The first error: %s",
                *(len(failed), size, self.reward_on_error, _first(failed)),
            )

    def _warn(self, kind: str, message: str, *given: object) -> None:
        """Log a warning, once for each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(message, *given)

    def _metrics(
        self, runs: Sequence[Run], found: Mapping[str, list[Outcome]], statistics: dict[str, float]
    ) -> dict[str, float]:
        size, calls = len(runs), [call for run in runs for call in run.conversation.calls]
        statistics["neutralized_per_trajectory"] += sum(call.neutralized for call in calls) / size
        metrics = {f"rollout/{name}": value for name, value in statistics.items()}
        counts = Counter(call.kind for call in calls)
        self._warn_of_new_contexts(counts, Counter(call.cause for call in calls if call.cause))
        for kind in (EXTENDED, SPLICED, NEW_CONTEXT):
            metrics[f"endpoint/{kind}"] = counts[kind] / size
        metrics["endpoint/resent"] = sum(run.resent for run in runs) / size
        metrics["endpoint/error_share"] = len(found["failed"]) / size
        metrics["endpoint/uncalled_share"] = len(found["uncalled"]) / size
        named: dict[str, list[float]] = {}
        for outcome in found["done"]:
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
        self._warn(
            cause,
            "%d of %d API calls that continue a conversation began a new context, which costs time and memory: %s",
            *(afresh, afresh + continued, _CAUSES[cause]),
        )


@made_once
def _endpoint(host: str) -> Endpoint:
    """This process's endpoint at an address, which concurrent rollouts share."""
    return Endpoint(host)


def _end(run: Run, outcome: Outcome) -> None:
    """End an agent's run, and with it the rollout if the agent returned no rewards."""
    if isinstance(outcome.error, AgentMistake):
        run.stop(outcome.error)
    run.end()


def _stop_reason(run: Run, outcome: Outcome) -> StopReason:
    """Why a trajectory ended. A limit that cut its last turn or left no room for another takes precedence."""
    answers = run.conversation.answers
    if run.limit_reached is not None:
        return run.limit_reached
    if answers and answers[-1].finish_reason == "length":
        return StopReason.TURN_LIMIT
    if outcome.is_lost or (outcome.error is not None and (not answers or outcome.is_of_a_loop)):
        return StopReason.ENVIRONMENT_UNAVAILABLE
    if outcome.error is not None:
        return StopReason.AGENT_ERROR
    return StopReason.ENVIRONMENT_DONE if answers else StopReason.NO_CALL


def _kind(outcome: Outcome, reason: StopReason) -> str:
    """What an agent's end means: of `_MASKED`, "failed" if the policy is to blame, or "done"."""
    if reason is StopReason.NO_CALL:
        return "uncalled"
    if outcome.is_lost:  # also after a limit, which hides it in the stop reason
        return "lost"
    if reason.is_infrastructure_failure:
        return "broken"
    return "done" if outcome.failure is None else "failed"


def _first(outcomes: Sequence[Outcome]) -> str:
    """The first error, in one line."""
    return next((described(each.error) for each in outcomes if each.error), "the time limit was reached")
