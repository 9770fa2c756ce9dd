"""Makes the agent that an evaluation asks: a policy with its collector, as in training."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

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
from sorl_trl.command_line import mistakes
from sorl_trl.evaluation.arguments import Arguments, EvaluationArguments, ModelArguments
from sorl_trl.rollout import (
    PROTOCOLS,
    Collector,
    Engine,
    Generator,
    Responder,
    RolloutArguments,
    TagProtocol,
    TurnEnd,
    model_engine,
)
from sorl_trl.rollout.observation import MessageSanitizer
from sorl_trl.rollout.protocol import endless_messages
from sorl_trl.rollout.tasks import own_environment, prompt_rows
from sorl_trl.search import SearchBackend

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Agent:
    """A policy with everything that an evaluation needs to ask it."""

    collector: Collector
    generator: Generator | Engine
    rows: Callable[[Sequence[qa.Question]], list[dict[str, Any]]]
    """Makes a row per question, with its `prompt`. The environment gets the whole row."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template beside the messages."""

    def encoded(self, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """The token ids of the prompts, with what the environment of each row says at the beginning."""
        collector = self.collector
        sanitizer = MessageSanitizer(collector.tokenizer, collector.protocol)
        greetings = collector.responder.greet(rows)
        prompts = sanitizer.greet([row["prompt"] for row in rows], greetings, collector.limits.max_observation_tokens)
        return qa.encode_prompts(collector.tokenizer, [{"prompt": each} for each in prompts], **self.template_kwargs)


def load_agent(
    arguments: Arguments, questions: Sequence[qa.Question], search: SearchBackend | None, device: torch.device
) -> Agent:
    """Make the same collector as in training, with a generator that samples from the policy, as trainers do.

    Without `search`, the environment of the arguments answers.
    """
    rollout, template_kwargs = arguments.rollout, arguments.evaluation.template_kwargs
    tokenizer = tokenizer_of(arguments)
    rows = partial(prompt_rows, rollout=rollout, tokenizer=tokenizer)
    with mistakes():
        in_chat = not isinstance(rows(questions)[0]["prompt"], str)
    with mistakes(cannot_be_loaded(arguments.model.model_name_or_path)):
        model = load_model(arguments.model, device)
    with mistakes():
        environment: SearchBackend | Responder = search or own_environment(str(rollout.environment))
        own = environment.protocol if isinstance(environment, Responder) else PROTOCOLS[rollout.protocol]
        protocol = own or TagProtocol()
        if in_chat:
            protocol = protocol.in_chat(tokenizer, template_kwargs)
        limits = rollout.limits(arguments.evaluation.max_completion_length)
        collector = Collector(tokenizer, environment, protocol, limits, rejoin_after=arguments.engine.rejoin_after)
        end = TurnEnd(tokenizer, protocol.stop_strings, message_ends(model, tokenizer))
        if in_chat and (warning := endless_messages(tokenizer, end.eos_token_ids, template_kwargs)):
            logger.warning(warning)
        kind, gib = arguments.engine.rollout_engine, arguments.engine.kv_cache_gib
        engine = model_engine(model, end, generation_config(arguments.evaluation), kind, kv_cache_gib=gib)
    return Agent(collector, engine, rows, template_kwargs)


def tokenizer_of(arguments: Arguments) -> Any:
    model = arguments.model
    return load_tokenizer(model.model_name_or_path, model.model_revision, model.trust_remote_code, arguments.rollout)


def load_tokenizer(name: str, revision: str, trust_remote_code: bool, rollout: RolloutArguments) -> Any:
    """Load a policy's tokenizer, or the base model's for an adapter that has none.

    Raises:
        UserMistake: There is no tokenizer, or it lacks a chat template that the rollout needs.
    """
    with mistakes(cannot_be_loaded(name)):
        adapter = find_adapter_config_file(name, revision=revision)
        if adapter and not has_file(name, "tokenizer_config.json", revision=revision):
            base = json.loads(Path(adapter).read_bytes())
            name, revision = base["base_model_name_or_path"], base.get("revision") or "main"
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    with mistakes():
        rollout.check_template(tokenizer)
    return tokenizer


def cannot_be_loaded(name: str) -> str:
    return f"`model_name_or_path` is {name!r}, which cannot be loaded"


def load_model(model: ModelArguments, device: torch.device) -> PreTrainedModel:
    """Load the policy in evaluation mode, with its base model if the checkpoint is an adapter."""
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


def generation_config(evaluation: EvaluationArguments) -> GenerationConfig:
    """Greedy or plain sampling, without the penalties and cuts of a checkpoint's own generation config."""
    sampling: dict[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 50}  # without meaning if greedy
    if evaluation.temperature:
        sampling = {"temperature": evaluation.temperature, "top_p": evaluation.top_p, "top_k": 0, "min_p": 0.0}
    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=bool(evaluation.temperature), repetition_penalty=1.0, **sampling
    )
