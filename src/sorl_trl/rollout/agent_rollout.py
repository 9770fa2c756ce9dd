"""The collector as TRL's `rollout_func`, for the trainers of this package and for plain `trl.GRPOTrainer`."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from datasets import Dataset
from trl import GRPOTrainer
from trl.chat_template_utils import get_training_chat_template, is_chat_template_prefix_preserving
from trl.data_utils import is_conversational

from sorl_trl.rollout import (
    Collector,
    Engine,
    EngineOptions,
    EnvironmentResponder,
    Responder,
    RetryPolicy,
    RolloutLimits,
    SearchResponder,
    TagProtocol,
    ToolBox,
    environment_statistics,
    rollout_statistics,
)
from sorl_trl.rollout.chat import NO_PROMPT, RolloutSetup, holds_images, messages_of
from sorl_trl.rollout.policy_rollout import MESSAGES, PROMPTS, TWO_LOOPS, PolicyRollout, with_columns
from sorl_trl.rollout.responder import Factory
from sorl_trl.rollout.trajectories import tool_statistics
from sorl_trl.search import SearchBackend
from sorl_trl.types import Trajectory


class AgentRollout(PolicyRollout):
    """A `rollout_func` in which the policy acts in an environment between its generations.

    Besides TRL's keys, it returns for each trajectory `env_mask` (1 on the policy's tokens), `turn_ids` (the turn of
    each token, -1 on the environment's) and, for reward functions, `trajectory` (a `sorl_trl.types.Trajectory`) and
    `environments` (the environment objects, if the responder has any). If the chat template shows tools, it also
    returns `trajectory_messages`, the completions as messages in the form of TRL's own tools, and `prompt_messages`,
    the prompts with what `reset` added. Statistics of every rollout are logged as `rollout/…`.

    The environment gets one example per trajectory, its row of the training set. `trl.GRPOTrainer` does not pass the
    row on, so the example is then only the `prompt`.

    Args:
        environment: Answers the policy's turns: a class with a method `step`, a function that makes such an object, or
            several of them by name, which `EnvironmentResponder` describes; or any `Responder`.
        protocol: How text becomes an action and a reply becomes text; defaults to the environment's own, if any.
            For conversational prompts, the chat template's frame replaces its default `message_frame`.
        limits: The limits of one trajectory. `max_trajectory_tokens` defaults to the trainer's `max_completion_length`
            and must not exceed it. If the chat template shows tools, the defaults are those of TRL's own tools:
            `max_tool_calling_iterations` turns with calls, and no limit other than `max_completion_length`.
        engine: How turns are generated, and when rows continue with replies.

    From `generation_kwargs`, the rollout takes only sampling options; it sets the ends of turns, the output and the
    seed itself.

    Raises TypeError if an argument has the wrong type, and ValueError for a `protocol` with a `ToolBox`.
    """

    answers = True

    def __init__(
        self,
        environment: Responder | Factory | Mapping[str, Factory],
        protocol: TagProtocol | None = None,
        limits: RolloutLimits | None = None,
        engine: EngineOptions | None = None,
    ) -> None:
        if not isinstance(environment, Responder | Mapping) and not callable(environment):
            raise TypeError(
                f"environment is {environment!r}, but must be an environment class, or a `Responder`; `SearchRollout` "
                "takes a search engine"
            )
        responder = environment if isinstance(environment, Responder) else EnvironmentResponder(environment)
        if isinstance(responder, ToolBox) and protocol is not None:
            raise ValueError("protocol is given, but the chat template's tools define their own format: leave it out")
        super().__init__(engine)
        self._responder = responder
        self.protocol = protocol or getattr(responder, "protocol", None) or TagProtocol()
        self.stop_strings = self.protocol.stop_strings
        self.limits = limits
        self.needs_prompts = not (isinstance(responder, ToolBox) and responder.has_objects)

    def collect(
        self,
        setup: RolloutSetup,
        prompts: Sequence[Any],
        examples: Sequence[Mapping[str, Any]],
        engine: Engine,
        any_active: Callable[[bool], bool] = bool,
    ) -> tuple[list[Trajectory], dict[str, float]]:
        """See `PolicyRollout.collect`. Raises ValueError for prompts with images."""
        if any(map(holds_images, prompts)):
            raise ValueError(
                f"`{type(self).__name__}` supports only text, but the prompts contain images, which the policy would "
                "not see."
            )
        collector = self.collector(setup, is_conversational({"prompt": prompts[0]}))
        with closing(self._responder):
            rows = self._responder.open(examples)
            greeted = [*map(collector.encoder.greeted, prompts, (row.greeting for row in rows))]
            prompt_ids = setup.encode([prompt for prompt, _ in greeted], [row.tools or () for row in rows])
            trajectories = collector.run(prompt_ids, engine, any_active, setup.progress)
        statistics = rollout_statistics(trajectories) | collector.time
        statistics["neutralized_per_trajectory"] += sum(hits for _, hits in greeted) / max(len(trajectories), 1)
        metrics = {f"rollout/{name}": value for name, value in statistics.items()}
        for name, value in environment_statistics(trajectories, self._responder).items():
            metrics[f"environment/{name}"] = value
        columns: dict[str, Any] = {"environments": self._responder.environments}
        if self.shows_tools:
            columns[MESSAGES] = [
                messages_of(each, setup.tokenizer, row.tools or ())
                for each, row in zip(trajectories, rows, strict=True)
            ]
            columns[PROMPTS] = [prompt for prompt, _ in greeted]
            metrics |= tool_statistics(trajectories)
        return with_columns(trajectories, **columns), metrics

    def measures(self, row: int) -> Mapping[str, float | None]:
        return self._responder.rows[row].measures()

    def fork(self) -> AgentRollout:
        forked = copy.copy(self)
        forked._responder = self._responder.fork()
        return forked

    def check(self, config: Any, tools: Any = None) -> None:
        super().check(config, tools)
        if config.max_tool_calling_iterations is not None and (self.limits or not self.shows_tools):
            raise ValueError(
                f"`max_tool_calling_iterations` is {config.max_tool_calling_iterations}, but applies only to tools "
                "without `RolloutLimits`. Set `RolloutLimits.max_turns` (`max_turns` in a recipe) instead."
            )

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template shows tools, and turns are messages that call them."""
        return isinstance(self._responder, ToolBox)

    def setup(self, trainer: GRPOTrainer) -> RolloutSetup:
        """What the rollout needs from a trainer. Tools are shown by the template that TRL would use."""
        shown_by, most = trainer.chat_template, trainer.args.max_completion_length
        if self.limits is None and self.shows_tools:
            calls = trainer.args.max_tool_calling_iterations
            limits = RolloutLimits(sys.maxsize if calls is None else calls, most, sys.maxsize, most)
        else:
            limits = (self.limits or RolloutLimits()).within(most)
        if self.shows_tools and not is_chat_template_prefix_preserving(trainer.processing_class):
            shown_by = get_training_chat_template(trainer.processing_class)
        options = trainer.chat_template_kwargs
        return RolloutSetup(trainer.processing_class, shown_by, options, trainer.eos_token_ids, limits)

    def check_tokenizer(self, trainer: GRPOTrainer) -> None:
        if self.shows_tools:
            self.collector(self.setup(trainer))

    def collector(self, setup: RolloutSetup, conversational: bool = True) -> Collector:
        """A new collector each time, because one rollout may serve several trainers.

        In a conversation, feedback to the policy is a chat message.
        """
        protocol, options = self.protocol, dict(setup.chat_template_kwargs)
        if self.shows_tools:
            options["chat_template"] = setup.chat_template or setup.processing_class.chat_template
        if conversational:
            protocol = protocol.in_chat(setup.tokenizer, options)
        return Collector(setup.tokenizer, self._responder, protocol, setup.limits, self.engine.rejoin_after)


class SearchRollout(AgentRollout):
    """A `rollout_func` in which the policy may search between its generations.

    ```python
    trainer = SOGRPOTrainer(model, exact_match_reward, args, dataset, rollout_func=SearchRollout(search))
    ```

    `AgentRollout` describes the return value and the other arguments.

    Args:
        search: The search engine. Up to 8 threads query it at the same time if it sets `thread_safe = True`, else one.
        retry: How often and how long to retry when the search engine is down.
    """

    def __init__(
        self,
        search: SearchBackend,
        protocol: TagProtocol | None = None,
        limits: RolloutLimits | None = None,
        retry: RetryPolicy | None = None,
        engine: EngineOptions | None = None,
    ) -> None:
        self.search = search
        top_k = (limits or RolloutLimits()).top_k
        super().__init__(SearchResponder(search, protocol, top_k, retry), protocol, limits, engine)


def tools_as_rollout(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a trainer, with `tools` and `environment_factory`, if given, replaced by an `AgentRollout`.

    As in TRL, the environments' `get_reward` counts as a reward of weight 1, and environments that write the prompts
    need no `train_dataset`. Raises ValueError if there is a `rollout_func`, too.
    """
    tools, factory = given.get("tools"), given.get("environment_factory")
    if not (tools or factory):
        return dict(given)
    if given.get("rollout_func") is not None:
        raise ValueError(TWO_LOOPS)
    box, args = ToolBox(tools or (), factory), given["args"]
    changed = {"rollout_func": AgentRollout(box), **_with_rewards(given, box.rewards)}
    if given.get("train_dataset") is None and factory is not None:
        rows = args.generation_batch_size // args.num_generations
        changed["train_dataset"] = Dataset.from_list([{"prompt": NO_PROMPT}] * rows)
    without = {name: value for name, value in given.items() if name not in ("tools", "environment_factory")}
    return {**without, **changed}


def _with_rewards(given: Mapping[str, Any], own: Sequence[Any]) -> dict[str, Any]:
    """The arguments of a trainer that concern reward functions, with further ones of weight 1."""
    functions, processors, args = given.get("reward_funcs"), given.get("reward_processing_classes"), given["args"]
    functions = [] if functions is None else functions if isinstance(functions, list) else [functions]
    if own and processors is not None:
        processors = [*(processors if isinstance(processors, list) else [processors]), *[None] * len(own)]
    if own and args.reward_weights is not None:
        args = copy.copy(args)
        args.reward_weights = [*args.reward_weights, *[1.0] * len(own)]
    return {"args": args, "reward_funcs": [*functions, *own], "reward_processing_classes": processors}
