"""Agents with weights of their own: one LoRA adapter each on one base model, as in Dr. MAS without shared weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from peft import LoraConfig, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn

from sorl_trl.checks import NOT_NEGATIVE
from sorl_trl.records.resume_point import ADAPTERS
from sorl_trl.rollout import Engine
from sorl_trl.rollout.agent_engine import AgentEngine
from sorl_trl.trainers.adapters import Adapters, why_not_beside_others
from sorl_trl.trainers.agents import names_of
from sorl_trl.trainers.base import TurnLevelTrainer
from sorl_trl.trainers.batch import AGENT_IDS, loss_mask_of
from sorl_trl.trainers.checks import disable_noise
from sorl_trl.trainers.config import TurnLevelConfig
from sorl_trl.trainers.critic import CRITIC_ATTRIBUTE
from sorl_trl.trainers.forward import Forward, Pass
from sorl_trl.trainers.optimizer_step import clip_apart, move_to_own_groups
from sorl_trl.trainers.prompts import IMAGE_INPUTS

_ONLY: Mapping[str, tuple[Any, str]] = {
    "use_vllm": (False, "its engine has one set of weights"),
    "async_staleness": (0, "what samples ahead has one set of weights"),
    "router_replay": ("none", "what an agent chose for a context is not what another one would"),
    "ddp_find_unused_parameters": (False, "an agent's pass uses no other agent's parameters"),
}
"""The only value that a field may have, and why."""


@dataclass
class MultiAgentConfig(TurnLevelConfig):
    """[`TurnLevelConfig`] plus learning rates per agent. For Dr. MAS, use `MultiAgentConfig(**SETTINGS["dr_mas"])`."""

    agent_learning_rates: dict[str, float] | None = field(
        default=None,
        metadata={
            "help": "Learning rates of agents, by name, that differ from `learning_rate`. 0: it is not trained."
        },
    )
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Must be False: all agents take part in every step."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, (only, why) in _ONLY.items():
            if getattr(self, name) != only:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}, but must be {only!r} with `agents`: {why}.")
        for agent, rate in (self.agent_learning_rates or {}).items():
            NOT_NEGATIVE.check(f"agent_learning_rates[{agent!r}]", rate)


class MultiAgentTrainer(TurnLevelTrainer):
    """`SOGRPOTrainer` for agents that do not share their weights: each has a LoRA adapter on one base model.

    An agent's turns are sampled and trained with its adapter, which reads the whole context, whoever wrote it. Each
    agent has a pass in every micro-batch, a learning rate, and a gradient that `max_grad_norm` clips on its own. The
    reference policy (`beta`) is the base model. Every adapter is saved in a folder of its name, from which
    `PeftModel.from_pretrained(base, "out/planner", adapter_name="planner")` loads it.

    The rollout says whose turn it is: the environment of an `AgentRollout`, the `model` of API calls to an
    `EndpointRollout`, or `agents` in what a function returns, which samples within `trainer.adapters.active(agent)`.

    ```python
    trainer = MultiAgentTrainer(
        "Qwen/Qwen2.5-0.5B-Instruct",
        agent_reward,
        MultiAgentConfig("out", **SETTINGS["dr_mas"], agent_learning_rates={"searcher": 2e-5}),
        dataset,
        rollout_func=EndpointRollout(team),
        agents={"planner": LoraConfig(r=16), "searcher": LoraConfig(r=8)},
    )
    ```

    Raises:
        TypeError: `args` is not a `MultiAgentConfig`.
        ValueError: A name or an adapter of `agents` cannot stand beside the others, DeepSpeed or FSDP is used, a
            rollout has a turn of no such agent, or one of the reasons of `SOGRPOTrainer`.
    """

    config_class: ClassVar[type[TurnLevelConfig]] = MultiAgentConfig
    default_method: ClassVar[str] = "dr_mas"
    args: MultiAgentConfig
    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "multi-agent"]

    def __init__(self, *arguments: Any, agents: Mapping[str, LoraConfig], **named: Any) -> None:
        if not agents:
            raise ValueError("`agents` is empty, but must have a `LoraConfig` for each agent.")
        for name, config in agents.items():
            if reason := why_not_beside_others(config):
                raise ValueError(f"`agents[{name!r}]` cannot stand beside other adapters: {reason}.")
        # TRL makes an adapter "default", and sees to what a PEFT model needs.
        super().__init__(*arguments, peft_config=copy.deepcopy(next(iter(agents.values()))), **named)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError("`agents` are given, but DeepSpeed and FSDP clip all gradients together: use DDP.")
        self.agents = sorted(agents)  # so that a resumed run finds an agent's optimizer group, whatever their order
        self._add(agents)
        self.adapters = Adapters(self.model)
        self._forward = AgentForward(self)
        if self.args.disable_dropout:
            disable_noise(self.model)

    def _add(self, agents: Mapping[str, LoraConfig]) -> None:
        """Replace TRL's adapter by one for each agent."""
        parts = {part for name, _ in self.model.named_modules() for part in name.split(".")}
        if unfit := [name for name in agents if name in parts | {"ref", CRITIC_ATTRIBUTE}]:
            raise ValueError(f"`agents` has {unfit[0]!r}, but that is the name of a part of the model.")
        if unknown := [name for name in self.args.agent_learning_rates or {} if name not in agents]:
            raise ValueError(f"`agent_learning_rates` has {unknown[0]!r}, but `agents` has {[*agents]}.")
        for name in self.agents:
            self.model.add_adapter(name, copy.deepcopy(agents[name]))
        self.model.set_adapter(self.agents[0])
        self.model.delete_adapter("default")
        self.model.set_requires_grad(self.agents)

    def agent_engine(self, make: Callable[[], Engine]) -> Engine:
        """The engine that samples: one that `make` makes for each agent."""
        return AgentEngine({agent: make() for agent in self.agents}, self.adapters.active)

    def _parameters_of(self, agent: str) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if agent in name.split(".")}

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """TRL's optimizer, or a user's own, with a group for each agent, of its own learning rate."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if not any("agent" in group for group in optimizer.param_groups):
            rates = dict.fromkeys(self.agents, self.args.learning_rate) | (self.args.agent_learning_rates or {})
            parts = [(self._parameters_of(agent), {"lr": rates[agent], "agent": agent}) for agent in self.agents]
            move_to_own_groups(optimizer, parts)
        return optimizer

    def _clip_grad_norm(self, model: Any) -> Any:
        parts = [self._parameters_of(agent).values() for agent in self.agents]
        norms = clip_apart(self.accelerator, parts, self.args.max_grad_norm)
        for agent, norm in zip(self.agents, norms, strict=True):
            self._metrics["train"][f"agents/{agent}/grad_norm"].append(float(norm))
        return torch.stack(norms).norm()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # transformers would freeze all adapters but one
        for agent in self.agents:
            weights = load_file(Path(resume_from_checkpoint, agent, ADAPTERS[0]))
            set_peft_model_state_dict(self.model, weights, adapter_name=agent)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))


class AgentForward(Forward):
    """Makes a pass for each agent, with its adapter, over what it has read and written.

    Every process makes all passes, even of an agent without a turn in a batch, because DDP waits for each gradient.
    """

    def __call__(self, model: Any, batch: Mapping[str, Any], **options: Any) -> Pass:
        """What each agent's policy says of its turns; for the reference policy, what the base model says of all.

        Raises ValueError if the agent of a turn has no adapter.
        """
        trainer, agents, names = self._trainer, self._trainer.agents, names_of(batch)
        if trainer.adapters.are_off or "layouts" in options:  # for the reference policy, or to try out a layout
            return super().__call__(model, batch, **options)
        unknown = [name for name in names or ("",) if name not in agents]
        if unknown and loss_mask_of(batch).any():
            raise ValueError(f"The rollout has a turn of the agent {unknown[0]!r}, but `agents` has {agents}.")
        trainer.model.set_requires_grad(agents)  # PEFT has frozen all but one after the reference's pass
        passes = []
        for agent in agents:
            with trainer.adapters.active(agent):
                share = share_of(batch, names.index(agent) if agent in names else len(names))
                passes.append(super().__call__(model, share, **options))

        def summed(name: str) -> Any:
            found = [getattr(each, name) for each in passes]
            return None if found[0] is None else sum(found)

        aux_loss = summed("aux_loss")
        return Pass(summed("logps"), summed("entropies"), None, None if aux_loss is None else aux_loss / len(passes))


def share_of(batch: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A batch that scores only the tokens of the agent with this number, and reads only what comes before these.

    Something is read of each row, and all if there are images.
    """
    mask = loss_mask_of(batch)
    scored = mask * (batch[AGENT_IDS] == number) if AGENT_IDS in batch else torch.zeros_like(mask)
    share = {**batch, "tool_mask": scored}
    if any(name in batch for name in IMAGE_INPUTS):
        return share
    contexts = batch.get("context_ids", torch.zeros_like(batch["turn_ids"])).abs()
    places = torch.arange(1, mask.size(1) + 1, device=mask.device).expand_as(contexts)
    last = places.new_zeros(len(mask), int(contexts.max()) + 1).scatter_reduce(1, contexts, places * scored, "amax")
    share["completion_mask"] = batch["completion_mask"] * (places <= last.gather(1, contexts))
    share["prompt_mask"] = batch["prompt_mask"].clone()
    share["prompt_mask"][:, :-1] *= last[:, :1] > 0
    return share
