"""Builds what asks a policy, from the arguments that training, evaluations and `sorl serve-policy` share."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils.hub import has_file
from transformers.utils.peft_utils import find_adapter_config_file

from sorl_trl import qa
from sorl_trl.checks import Checked, OneOf, factory_named, import_named
from sorl_trl.command_line import UserMistake, check_checkpoint, mistakes
from sorl_trl.rollout import PROTOCOLS, Engine, EngineOptions, RolloutArguments, RolloutLimits, TurnEnd, model_engine
from sorl_trl.rollout.protocol import endless_messages
from sorl_trl.rollout.tasks import prompt_rows
from sorl_trl.search import BuiltSearch, NoSearch, SearchArguments, SearchBackend

if TYPE_CHECKING:  # it takes seconds
    from sorl_trl.rollout.chat import RolloutSetup
    from sorl_trl.rollout.policy_rollout import PolicyRollout

logger = logging.getLogger(__name__)

DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass
class ModelArguments(Checked):
    """Which policy to ask, and how to load it: the fields of TRL's `ModelConfig` that do not concern training."""

    model_name_or_path: str = field(metadata={"help": "Checkpoint folder, PEFT adapter folder, or Hub id."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit on the Hub."})
    dtype: Annotated[str, OneOf(DTYPES)] = field(
        default="auto",
        metadata={"help": f"Data type of the weights: {', '.join(DTYPES)}. 'auto' is the one they were saved in."},
    )
    attn_implementation: str | None = field(default=None, metadata={"help": "Attention implementation to use."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the checkpoint."})

    @property
    def cannot_be_loaded(self) -> str:
        return f"`model_name_or_path` is {self.model_name_or_path!r}, which cannot be loaded"


@dataclass(frozen=True)
class Parts:
    """What asks a policy: tokenizer → limits → search → rollout, and without a trainer, setup and engine (`load`).

    Each part is made when it is first read, and kept, so that a dry run rehearses with training's. Reading one raises
    UserMistake for a policy that cannot be loaded, and ValueError for arguments that do not fit each other.
    """

    model: ModelArguments
    rollout: RolloutArguments
    engine: EngineOptions
    search: SearchArguments
    max_completion_length: int | None
    chat_template_kwargs: Mapping[str, Any]

    @cached_property
    def tokenizer(self) -> Any:
        """The policy's tokenizer, or the base model's for an adapter without one."""
        name, revision = self.model.model_name_or_path, self.model.model_revision
        if not name:
            raise UserMistake("`model_name_or_path` is missing: give a checkpoint's folder or a Hub id")
        check_checkpoint(name)
        with mistakes(self.model.cannot_be_loaded):
            adapter = find_adapter_config_file(name, revision=revision)
            if adapter and not has_file(name, "tokenizer_config.json", revision=revision):
                base = json.loads(Path(adapter).read_bytes())
                name, revision = base["base_model_name_or_path"], base.get("revision") or "main"
            trust = self.model.trust_remote_code
            tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust)
        self.rollout.check_template(tokenizer)
        return tokenizer

    @cached_property
    def limits(self) -> RolloutLimits:
        return self.rollout.limits(self.max_completion_length)

    def rows(self, questions: Sequence[qa.Question]) -> list[dict[str, Any]]:
        """A row per question, with its `prompt`. The environment or the agent gets the whole row."""
        return prompt_rows(questions, self.rollout, self.tokenizer)

    def check(self, in_chat: bool) -> None:
        """Raise ValueError if the protocol does not fit tokenizer, limits and prompts.

        It opens no search engine, which may take long, because that may index a corpus.
        """
        from sorl_trl.rollout.agent_rollout import AgentRollout

        rollout = self._rollout_with(NoSearch())
        if isinstance(rollout, AgentRollout):
            rollout.collector(self._setup(()), in_chat)

    @cached_property
    def built_search(self) -> BuiltSearch | None:
        """The search engine; None if something else answers the policy."""
        return self.search.build_search() if self.rollout.searches else None

    @cached_property
    def rollout_func(self) -> PolicyRollout:
        """The `PolicyRollout` with the search engine, the environment or the agent."""
        return self._rollout_with(self.built_search.backend if self.built_search else NoSearch())

    def _rollout_with(self, search: SearchBackend) -> PolicyRollout:
        from sorl_trl.rollout.agent_rollout import AgentRollout, SearchRollout

        asked, limits = self.rollout, self.limits
        if asked.environment:
            return AgentRollout(
                factory_named("environment", asked.environment, "step"), limits=limits, engine=self.engine
            )
        if not asked.has_agent:
            return SearchRollout(search, PROTOCOLS[asked.protocol], limits, engine=self.engine)

        from sorl_trl.endpoint import EndpointRollout, command_agent

        return EndpointRollout(
            import_named("agent", asked.agent) if asked.agent else command_agent(str(asked.agent_command)),
            max_turn_tokens=min(asked.max_turn_tokens, limits.max_trajectory_tokens or asked.max_turn_tokens),
            time_limit_s=asked.agent_time_limit_s,
            reward_on_error=asked.reward_on_error,
            engine=self.engine,
        )

    def _setup(self, eos_token_ids: Sequence[int]) -> RolloutSetup:
        from sorl_trl.rollout.chat import RolloutSetup

        return RolloutSetup(self.tokenizer, None, self.chat_template_kwargs, eos_token_ids, self.limits)

    def load(
        self, device: torch.device, sampling: GenerationConfig, in_chat: bool, stop_strings: Sequence[str] = ()
    ) -> tuple[RolloutSetup, Engine]:
        """Load the policy, and make what a rollout otherwise reads from its trainer, and the engine that samples.

        Raises ValueError if the engine does not support the policy. Logs a warning if messages would not end.
        """
        model = self._model(device)
        setup = self._setup(message_ends(model, self.tokenizer))
        endless = endless_messages(setup.tokenizer, setup.eos_token_ids, setup.chat_template_kwargs)
        if endless and (in_chat or self.rollout.has_agent):
            logger.warning(endless)
        end = TurnEnd(setup.tokenizer, stop_strings, setup.eos_token_ids)
        return setup, model_engine(model, end, sampling, self.engine)

    def _model(self, device: torch.device) -> PreTrainedModel:
        """The policy in evaluation mode, with its base model if the checkpoint is an adapter."""
        options = asdict(self.model)
        name, revision = options.pop("model_name_or_path"), options.pop("model_revision")
        with mistakes(self.model.cannot_be_loaded):
            policy: Any = AutoModelForCausalLM.from_pretrained(name, revision=revision, **options)
            loaded: PreTrainedModel = policy.to(device).eval()
        return loaded


@dataclass(frozen=True)
class EvaluatedPolicy:
    """A policy with everything needed to evaluate it."""

    rollout: PolicyRollout
    setup: RolloutSetup
    engine: Engine
    rows: Callable[[Sequence[qa.Question]], list[dict[str, Any]]]
    """See `Parts.rows`."""


def message_ends(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """The token ids that end a message, as in training: the end-of-sequence tokens of tokenizer and checkpoint."""
    configured: Any = model.generation_config and model.generation_config.eos_token_id
    ends = configured if isinstance(configured, list) else [configured]
    return sorted({token_id for token_id in (tokenizer.eos_token_id, *ends) if token_id is not None})


def generation_config(temperature: float) -> GenerationConfig:
    """Greedy or plain sampling, without the penalties and cuts of a checkpoint's own generation config."""
    sampling: dict[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 50}  # without meaning if greedy
    if temperature:
        sampling = {"temperature": temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=bool(temperature), repetition_penalty=1.0, **sampling
    )
