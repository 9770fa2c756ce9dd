"""Loads the policy to evaluate or serve, and makes its rollout, as in training."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import has_file
from transformers.utils.peft_utils import find_adapter_config_file

from sorl_trl import qa
from sorl_trl.checks import import_named
from sorl_trl.command_line import mistakes
from sorl_trl.evaluation.arguments import Arguments, ModelArguments
from sorl_trl.rollout import (
    PROTOCOLS,
    Engine,
    EngineOptions,
    RolloutArguments,
    RolloutLimits,
    TurnEnd,
    model_engine,
)
from sorl_trl.rollout.protocol import endless_messages
from sorl_trl.rollout.tasks import own_environment, prompt_rows
from sorl_trl.search import SearchBackend

if TYPE_CHECKING:  # it takes seconds
    from sorl_trl.rollout.chat import RolloutSetup
    from sorl_trl.rollout.policy_rollout import PolicyRollout

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluatedPolicy:
    """A policy with everything needed to evaluate it."""

    rollout: PolicyRollout
    setup: RolloutSetup
    engine: Engine
    rows: Callable[[Sequence[qa.Question]], list[dict[str, Any]]]
    """Makes a row per question, with its `prompt`. The environment or the agent gets the whole row."""


def load_evaluated(
    arguments: Arguments, questions: Sequence[qa.Question], search: SearchBackend | None, device: torch.device
) -> EvaluatedPolicy:
    """Load the policy and make its rollout as in training, with an engine that samples as trainers do.

    Without `search`, the environment or agent in the arguments acts.
    """
    from sorl_trl.rollout.agent_rollout import AgentRollout

    evaluation, options = arguments.evaluation, arguments.engine
    tokenizer = tokenizer_of(arguments)
    rows = partial(prompt_rows, rollout=arguments.rollout, tokenizer=tokenizer)
    with mistakes():
        in_chat = not isinstance(rows(questions)[0]["prompt"], str)
        limits = arguments.rollout.limits(evaluation.max_completion_length)
        rollout = make_rollout(arguments.rollout, options, limits, search)
    model = load_model(arguments.model, device)
    with mistakes():
        setup = make_setup(model, tokenizer, limits, evaluation.template_kwargs)
        if isinstance(rollout, AgentRollout):
            rollout.collector(setup, in_chat)  # its protocol may not fit tokenizer or prompts
        if in_chat or arguments.rollout.has_agent:
            warn_of_endless_messages(setup)
        sampling = generation_config(evaluation.temperature, evaluation.top_p)
        engine = make_engine(model, setup, options, sampling, rollout.stop_strings)
    return EvaluatedPolicy(rollout, setup, engine, rows)


def make_rollout(
    rollout: RolloutArguments, engine: EngineOptions, limits: RolloutLimits, search: SearchBackend | None
) -> PolicyRollout:
    """The rollout of an evaluation, and of training unless the user gives a `rollout_func`.

    `search` is the search engine, if any. Raises ValueError if an environment or agent cannot be made.
    """
    from sorl_trl.rollout.agent_rollout import AgentRollout, SearchRollout

    if search is not None:
        return SearchRollout(search, PROTOCOLS[rollout.protocol], limits, engine=engine)
    if rollout.environment:
        return AgentRollout(own_environment(rollout.environment), limits=limits, engine=engine)

    from sorl_trl.endpoint import EndpointRollout, command_agent

    agent = import_named("agent", rollout.agent) if rollout.agent else command_agent(str(rollout.agent_command))
    return EndpointRollout(
        agent,
        max_turn_tokens=min(rollout.max_turn_tokens, limits.max_trajectory_tokens or rollout.max_turn_tokens),
        time_limit_s=rollout.agent_time_limit_s,
        reward_on_error=rollout.reward_on_error,
        engine=engine,
    )


def make_setup(
    model: PreTrainedModel, tokenizer: Any, limits: RolloutLimits, template_kwargs: Mapping[str, Any]
) -> RolloutSetup:
    """What a rollout reads from its trainer, made without a trainer."""
    from sorl_trl.rollout.chat import RolloutSetup

    return RolloutSetup(tokenizer, None, template_kwargs, message_ends(model, tokenizer), limits)


def warn_of_endless_messages(setup: RolloutSetup) -> None:
    """Log a warning if generation would continue after the end of a message."""
    if warning := endless_messages(setup.tokenizer, setup.eos_token_ids, setup.chat_template_kwargs):
        logger.warning(warning)


def make_engine(
    model: PreTrainedModel,
    setup: RolloutSetup,
    options: EngineOptions,
    sampling: GenerationConfig,
    stop_strings: Sequence[str] = (),
) -> Engine:
    """The engine that samples from the policy. Raises ValueError if it does not support the policy."""
    end = TurnEnd(setup.tokenizer, stop_strings, setup.eos_token_ids)
    return model_engine(model, end, sampling, options.rollout_engine, kv_cache_gib=options.kv_cache_gib)


def tokenizer_of(arguments: Arguments) -> Any:
    """Load the policy's tokenizer. Raises UserMistake if there is none, or it lacks a required chat template."""
    model = arguments.model
    tokenizer = load_tokenizer(model.model_name_or_path, model.model_revision, model.trust_remote_code)
    with mistakes():
        arguments.rollout.check_template(tokenizer)
    return tokenizer


def load_tokenizer(name: str, revision: str, trust_remote_code: bool) -> Any:
    """Load a policy's tokenizer, or the base model's for an adapter without one. Raises UserMistake on failure."""
    with mistakes(cannot_be_loaded(name)):
        adapter = find_adapter_config_file(name, revision=revision)
        if adapter and not has_file(name, "tokenizer_config.json", revision=revision):
            base = json.loads(Path(adapter).read_bytes())
            name, revision = base["base_model_name_or_path"], base.get("revision") or "main"
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    return tokenizer


def cannot_be_loaded(name: str) -> str:
    return f"`model_name_or_path` is {name!r}, which cannot be loaded"


def load_model(model: ModelArguments, device: torch.device) -> PreTrainedModel:
    """Load the policy in evaluation mode, with its base model if the checkpoint is an adapter.

    Raises UserMistake if it cannot be loaded.
    """
    with mistakes(cannot_be_loaded(model.model_name_or_path)):
        policy: Any = AutoModelForCausalLM.from_pretrained(
            model.model_name_or_path,
            revision=model.model_revision,
            dtype=model.dtype,
            attn_implementation=model.attn_implementation,
            trust_remote_code=model.trust_remote_code,
        )
        loaded: PreTrainedModel = policy.to(device).eval()
    return loaded


def message_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids that end a message, as in training: the end-of-sequence tokens of tokenizer and checkpoint."""
    configured: Any = model.generation_config and model.generation_config.eos_token_id
    ends = configured if isinstance(configured, list) else [configured]
    return sorted({token_id for token_id in (tokenizer.eos_token_id, *ends) if token_id is not None})


def generation_config(temperature: float, top_p: float = 1.0) -> GenerationConfig:
    """Greedy or plain sampling, without the penalties and cuts of a checkpoint's own generation config."""
    sampling: dict[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 50}  # without meaning if greedy
    if temperature:
        sampling = {"temperature": temperature, "top_p": top_p, "top_k": 0, "min_p": 0.0}
    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=bool(temperature), repetition_penalty=1.0, **sampling
    )
