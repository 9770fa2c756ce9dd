"""Agents with weights of their own: one LoRA adapter each on one base model, as in Dr. MAS without shared weights."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from peft import LoraConfig, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn

from sorl_trl.checks import NOT_NEGATIVE
from sorl_trl.command_line import UserMistake
from sorl_trl.records.resume_point import ADAPTERS
from sorl_trl.rollout import Engine
from sorl_trl.rollout.agent_engine import AgentEngine
from sorl_trl.trainers.adapters import Adapters, why_not_beside_others
from sorl_trl.trainers.agents import names_of
from sorl_trl.trainers.base import TurnLevelTrainer
from sorl_trl.trainers.batch import AGENT_IDS, loss_mask_of
from sorl_trl.trainers.checks import disable_noise
from sorl_trl.trainers.config import TurnLevelConfig
from sorl_trl.trainers.forward import Forward, Pass
from sorl_trl.trainers.optimizer_step import clip_apart, move_to_own_groups
from sorl_trl.trainers.prompts import IMAGE_INPUTS

_ONLY: Mapping[str, tuple[Any, str]] = {
    "use_vllm": (False, "its engine has one set of weights"),
    "async_staleness": (0, "what samples ahead has one set of weights"),
    "ddp_find_unused_parameters": (False, "each agent has a pass of its own, which uses no other's parameters"),
}
"""The only value that a field may have, and why."""


@dataclass
class MultiAgentConfig(TurnLevelConfig):
    """Configuration of [`MultiAgentTrainer`]: [`TurnLevelConfig`] plus a learning rate per agent.

    For Dr. MAS, use `MultiAgentConfig(**SETTINGS["dr_mas"])`, with `sorl_trl.methods.SETTINGS`.

    Parameters:
        agent_learning_rates: The learning rates of agents, by name.
        ddp_find_unused_parameters: Must be False.
    """

    agent_learning_rates: dict[str, float] | None = field(
        default=None,
        metadata={
            "help": "The learning rates of agents by name, if they differ from `learning_rate`. An agent whose rate "
            "is 0 stays as it is."
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

    An agent's turns are sampled and trained with its own adapter, which reads the whole context, whoever wrote it.
    Each agent has a pass in every micro-batch, a learning rate, and a gradient that is clipped by `max_grad_norm` on
    its own. The loss is the method's over all turns, so an agent's gradient is its share of it. The reference policy
    (`beta`) is the base model. Checkpoints hold every adapter in a folder of its name, for
    `PeftModel.from_pretrained(base, "out/planner", adapter_name="planner")`.

    The rollout names the agent of each turn: `AgentRollout` asks the environment, `EndpointRollout` takes the `model`
    of the API call, and a function of your own returns `agents`, and samples within `trainer.adapters.active(agent)`.

    Example:

    ```python
    trainer = MultiAgentTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=agent_reward,
        args=MultiAgentConfig(**SETTINGS["dr_mas"], output_dir="out", agent_learning_rates={"searcher": 2e-5}),
        train_dataset=dataset,
        rollout_func=EndpointRollout(team),
        agents={"planner": LoraConfig(r=16), "searcher": LoraConfig(r=8)},
    )
    trainer.train()
    ```

    Raises:
        TypeError: `args` is not a `MultiAgentConfig`.
        ValueError: `agents` has a name or an adapter that cannot stand beside the others, there is no `rollout_func`,
            DeepSpeed or FSDP is used, or one of the reasons of `SOGRPOTrainer`.
    """

    config_class: ClassVar[type[TurnLevelConfig]] = MultiAgentConfig
    default_method: ClassVar[str] = "dr_mas"
    args: MultiAgentConfig
    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "multi-agent"]

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: MultiAgentConfig | None = None,
        *positional: Any,
        agents: Mapping[str, LoraConfig],
        **named: Any,
    ) -> None:
        for name, config in agents.items():
            if reason := why_not_beside_others(config):
                raise ValueError(f"`agents[{name!r}]` cannot stand beside other adapters: {reason}.")
        # TRL makes an adapter "default", and sees to what a PEFT model needs.
        named["peft_config"] = copy.deepcopy(next(iter(agents.values()), None))
        super().__init__(model, reward_funcs, args, *positional, **named)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError("`agents` are given, but DeepSpeed and FSDP clip all gradients together: use DDP.")
        if self.rollout_func is None:
            raise ValueError("`rollout_func` is None, but with `agents` it must say whose turn each is.")
        self._add_agents(agents)
        self.agents = tuple(agents)
        self.adapters = Adapters(self.model)
        self._forward: Any = AgentForward(self)
        if self.args.disable_dropout:
            disable_noise(self.model)

    def _add_agents(self, agents: Mapping[str, LoraConfig]) -> None:
        """Give the policy an adapter for each agent, the same on all ranks, in place of TRL's."""
        taken = {"ref", *(part for name, _ in self.model.named_modules() for part in name.split("."))}
        for name in agents:
            if name in taken or not re.fullmatch(r"[\w-]+", name):
                raise ValueError(
                    f"`agents` has {name!r}, but a name must consist of letters, digits, `_` and `-`, and be no part "
                    "of the names of the model's modules."
                )
        if unknown := [name for name in self.args.agent_learning_rates or {} if name not in agents]:
            raise ValueError(f"`agent_learning_rates` has {unknown[0]!r}, but `agents` has {[*agents]}.")
        with torch.random.fork_rng([self.model.device] if self.model.device.type == "cuda" else []):
            torch.manual_seed(self.args.seed)
            for name, config in agents.items():
                self.model.add_adapter(name, copy.deepcopy(config))
        self.model.set_adapter(next(iter(agents)))
        self.model.delete_adapter("default")
        self.model.set_requires_grad([*agents])

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
            options = {agent: {"lr": rate, "agent": agent} for agent, rate in rates.items()}
            move_to_own_groups(optimizer, [(self._parameters_of(agent), options[agent]) for agent in self.agents])
        return optimizer

    def _clip_grad_norm(self, model: Any) -> Tensor:
        parts = [self._parameters_of(agent).values() for agent in self.agents]
        norms = clip_apart(self.accelerator, parts, self.args.max_grad_norm)
        for agent, norm in zip(self.agents, norms, strict=True):
            self._metrics["train"][f"agents/{agent}/grad_norm"].append(float(norm))
        return torch.stack(norms).norm()

    # transformers would load the adapters of a checkpoint with all but one frozen, and only one of the best.

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        for agent in self.agents:
            file = Path(resume_from_checkpoint, agent, ADAPTERS[0])
            if not file.is_file():
                raise UserMistake(
                    f"{resume_from_checkpoint} has no adapter of the agent {agent!r}: {file} is missing."
                )
            set_peft_model_state_dict(self.model, load_file(file), adapter_name=agent)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))


class AgentForward:
    """Makes a pass for each agent, with its adapter, over what the agent has read and written. See `Forward`.

    Each pass is made on every process, also if the agent has no turn in a batch, since DDP waits for every gradient.
    """

    def __init__(self, trainer: MultiAgentTrainer) -> None:
        self._trainer, self._forward = trainer, Forward(trainer)

    @property
    def layouts(self) -> Sequence[str]:
        return self._forward.layouts

    def __call__(self, model: Any, batch: Mapping[str, Any], **options: Any) -> Pass:
        """What the agents say of their turns; if PEFT has switched all adapters off, the base model of all turns.

        Raises:
            ValueError: A turn's agent has no adapter.
        """
        trainer, names = self._trainer, names_of(batch)
        if trainer.adapters.are_off:
            return self._forward(model, batch, **options)
        unknown = [name for name in names or ("",) if name not in trainer.agents]
        if unknown and loss_mask_of(batch).any():
            raise ValueError(
                f"The rollout has a turn of the agent {unknown[0]!r}, but `agents` has {[*trainer.agents]}."
            )
        trainer.model.set_requires_grad([*trainer.agents])  # the pass of the reference has frozen all but one
        passes: list[Any] = []
        for agent in trainer.agents:
            share = share_of(batch, names.index(agent) if agent in names else len(names))
            with trainer.adapters.active(agent):
                passes.append(self._forward(model, share, **options))
        logps, entropies = sum(each.logps for each in passes), None
        if passes[0].entropies is not None:
            entropies = sum(each.entropies for each in passes)
        aux_loss = None if passes[0].aux_loss is None else sum(each.aux_loss for each in passes) / len(passes)
        return Pass(logps, entropies, None, aux_loss)


def share_of(batch: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A batch in which only the tokens of the agent with this number are scored, and only what comes before them is read.

    Something of each row is read in any case. With images, all of it is.
    """
    mask = loss_mask_of(batch)
    scored = mask.bool() & (batch[AGENT_IDS] == number) if AGENT_IDS in batch else torch.zeros_like(mask).bool()
    share = {**batch, "tool_mask": scored.to(mask.dtype)}
    if any(name in batch for name in IMAGE_INPUTS):
        return share
    contexts = batch["context_ids"].abs() if "context_ids" in batch else torch.zeros_like(mask, dtype=torch.long)
    places = torch.arange(1, mask.size(1) + 1, device=mask.device).expand_as(mask)
    last = mask.new_zeros((len(mask), int(contexts.max()) + 1), dtype=torch.long)
    last = last.scatter_reduce(1, contexts, places * scored, "amax")
    share["completion_mask"] = batch["completion_mask"] * (places <= last.gather(1, contexts))
    share["prompt_mask"] = batch["prompt_mask"].clone()
    share["prompt_mask"][:, :-1] *= last[:, :1] > 0
    return share
