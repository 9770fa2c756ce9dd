"""Agents with separate weights: one LoRA adapter each on one base model, as in Dr. MAS without shared weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from peft import LoraConfig, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn

from sorl_trl.checks import NOT_NEGATIVE, check_choice
from sorl_trl.methods import AgentWise
from sorl_trl.records.resume_point import ADAPTERS
from sorl_trl.rollout import Engine, Generation
from sorl_trl.trainers.adapters import adapter_alone, why_not_beside_others
from sorl_trl.trainers.agents import names_of
from sorl_trl.trainers.base import TurnLevelTrainer
from sorl_trl.trainers.batch import AGENT_IDS, loss_mask_of
from sorl_trl.trainers.checks import disable_noise
from sorl_trl.trainers.config import SOGRPOConfig, TurnLevelConfig
from sorl_trl.trainers.critic import CRITIC_ATTRIBUTE
from sorl_trl.trainers.forward import Forward, Pass
from sorl_trl.trainers.optimizer_step import clip_apart, move_to_own_groups

_ONLY: Mapping[str, tuple[Any, str]] = {
    "use_vllm": (False, "its engine has one set of weights"),
    "async_staleness": (0, "asynchronous rollouts have one set of weights"),
    "router_replay": ("none", "agents choose different experts for the same context"),
    "ddp_find_unused_parameters": (False, "an agent's pass does not use other agents' parameters"),
    "peft_config": (None, "each agent has its own"),
}
"""The only allowed value of an argument or field, besides None, and why."""


class MultiAgentTrainer(TurnLevelTrainer):
    """`SOGRPOTrainer` for agents that do not share their weights: each has a LoRA adapter on one base model.

    An agent's turns are sampled and trained with its adapter, which reads the whole context, including other agents'
    turns. Each agent has its own pass in every micro-batch, its own learning rate, and its own gradient clipping by
    `max_grad_norm`. An update without a token of an agent does not change its adapter. The reference policy (`beta`)
    is the base model. Every adapter is saved in a folder of its name; `PeftModel.from_pretrained(base, "out/planner",
    adapter_name="planner")` loads it.

    The rollout names each turn's agent: through the environment of an `AgentRollout`, the `model` of API calls to an
    `EndpointRollout`, or the returned `agents` of a function that samples within `trainer.acting(agent)`.

    Args:
        agents: The adapter of each agent, by its name.
        learning_rates: By agent's name, rates that differ from `learning_rate`. With 0, an agent is not trained. A
            resumed run keeps the rates of its checkpoint.

    Example:

    ```python
    trainer = MultiAgentTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=agent_reward,
        args=SOGRPOConfig(output_dir="out"),
        method="dr_mas",
        train_dataset=dataset,
        rollout_func=rollout,
        agents={"planner": LoraConfig(r=16), "searcher": LoraConfig(r=8)},
        learning_rates={"searcher": 2e-5},
    )
    trainer.train()
    ```

    In an evaluation during training, every agent plays its own part; in `sorl evaluate out/planner`, the planner's
    adapter plays all of them. Each agent that reads a context costs a pass, a prefill, and memory for keys and values.

    Raises ValueError for `agents` that cannot share a base model, DeepSpeed or FSDP, a turn of an unknown agent, and
    any reason of `SOGRPOTrainer`.
    """

    config_class: ClassVar[type[TurnLevelConfig]] = SOGRPOConfig
    default_method: ClassVar[Mapping[str, Any]] = {"credit": AgentWise()}
    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "multi-agent"]

    def __init__(
        self, *given: Any, agents: dict[str, LoraConfig], learning_rates: dict[str, float] | None = None, **named: Any
    ) -> None:
        args = named.get("args") or next(iter(given[2:]), None)
        for name, (only, why) in _ONLY.items():
            if (value := named.get(name, getattr(args, name, None))) not in (only, None):
                raise ValueError(f"`{name}` is {value!r:.60}, but must be {only!r} with `agents`: {why}.")
        for argument, by_name in {"agents": agents, "learning_rates": learning_rates or agents}.items():
            if not by_name or not isinstance(by_name, dict):
                raise ValueError(f"`{argument}` is {by_name!r}, but must be a dict with agents' names as keys.")
        for name, config in agents.items():
            if reason := why_not_beside_others(config):
                raise ValueError(f"`agents[{name!r}]` cannot share a base model with other adapters: {reason}.")
        for name, rate in (learning_rates or {}).items():
            check_choice("learning_rates", name, agents)
            NOT_NEGATIVE.check(f"learning_rates[{name!r}]", rate)
        # TRL makes an adapter "default", and sees to what a PEFT model needs.
        super().__init__(*given, **named | {"peft_config": copy.deepcopy(next(iter(agents.values())))})
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError("`agents` are given, but DeepSpeed and FSDP cannot clip gradients per agent: use DDP.")
        self.accelerator.ddp_handler.find_unused_parameters = False
        self.agents = sorted(agents)  # so that a resumed run finds an agent's optimizer group, whatever their order
        self._rates = dict.fromkeys(agents, self.args.learning_rate) | (learning_rates or {})
        self._replace_adapter(agents)
        self.acting = partial(adapter_alone, [*self.model.modules()])
        self._forward = AgentForward(self._host)

    def _replace_adapter(self, agents: Mapping[str, LoraConfig]) -> None:
        parts = {part for name, _ in self.model.named_parameters() for part in name.split(".")}
        if unfit := [name for name in agents if "." in name or name in parts | {"ref", CRITIC_ATTRIBUTE}]:
            raise ValueError(
                f"`agents` has {unfit[0]!r}, but a name must not contain '.' or be the name of a module of the model."
            )
        for name in self.agents:
            self.model.add_adapter(name, copy.deepcopy(agents[name]))
        self.model.set_adapter(self.agents[0])
        self.model.delete_adapter("default")
        self.model.set_requires_grad(self.agents)
        if self.args.disable_dropout:
            disable_noise(self.model)

    def agent_engine(self, make: Callable[[], Engine]) -> Engine:
        """The sampling engine, which combines one engine of `make` per agent."""
        return AgentEngine({agent: make() for agent in self.agents}, self.acting)

    def _parameters_of(self, agent: str) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if agent in name.split(".")}

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """TRL's optimizer, or the user's, with a parameter group and learning rate for each agent."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if not any("agent" in group for group in optimizer.param_groups):
            for agent in self.agents:
                move_to_own_groups(optimizer, self._parameters_of(agent), lr=self._rates[agent], agent=agent)
        return optimizer

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        """Leave agents without a gradient until some process has a token of theirs: momentum would move them."""
        acted = [any(p.grad is not None for p in self._parameters_of(agent).values()) for agent in self.agents]
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        batch = self._buffered_inputs[(self._step - 1) % int(self.args.steps_per_generation)]
        now = torch.stack([tokens_of(batch, agent).any() for agent in self.agents])
        acts = now | torch.tensor(acted, device=now.device)
        if self.accelerator.sync_gradients:
            acts = self.accelerator.gather(acts.unsqueeze(0)).any(0)
        if self.accelerator.scaler is None or acts.any():  # fp16's gradient scaler needs a gradient
            for agent in (agent for agent, each in zip(self.agents, acts.tolist(), strict=True) if not each):
                for parameter in self._parameters_of(agent).values():
                    parameter.grad = None
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        parts = [self._parameters_of(agent).values() for agent in self.agents]
        norms = clip_apart(self.accelerator, parts, self.args.max_grad_norm)
        for agent, norm in zip(self.agents, norms, strict=True):
            self._metrics["train"][f"agents/{agent}/grad_norm"].append(float(norm))
        return torch.stack(norms).norm()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # transformers would freeze all adapters but one
        for agent in self.agents:
            set_peft_model_state_dict(self.model, load_file(Path(resume_from_checkpoint, agent, ADAPTERS[0])), agent)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))


class AgentForward(Forward):
    """Makes a pass for each agent with its adapter, on every process, because DDP waits for each gradient."""

    def __call__(self, model: Any, batch: Mapping[str, Any], **options: Any) -> Pass:
        """See `Forward`. Raises ValueError if the agent of a turn has no adapter."""
        trainer, names = self._host.trainer, names_of(batch)
        agents = trainer.agents
        is_reference = any(getattr(each, "_disable_adapters", False) for each in trainer.model.modules())
        if is_reference or "layouts" in options:  # or to try out a layout
            return super().__call__(model, batch, **options)
        unknown = [name for name in names or ("",) if name not in agents]
        if unknown and loss_mask_of(batch).any():
            raise ValueError(f"The rollout has a turn of the agent {unknown[0]!r}, but `agents` are {agents}.")
        trainer.model.set_requires_grad(agents)  # PEFT has frozen all but one after the reference's pass
        passes = []
        for agent in agents:
            with trainer.acting(agent):
                passes.append(super().__call__(model, share_of(batch, agent), **options))
        found = zip(*((each.logps, each.entropies, each.aux_loss) for each in passes), strict=True)
        sums: list[Any] = [None if each[0] is None else sum(each) for each in found]
        return Pass(sums[0], sums[1], None, None if sums[2] is None else sums[2] / len(passes))


def tokens_of(batch: Mapping[str, Any], agent: str) -> Tensor:
    """(B, T), 1 on the tokens of an agent that the loss keeps."""
    names, numbers = names_of(batch), batch.get(AGENT_IDS, batch["turn_ids"])
    own: Tensor = numbers == (names.index(agent) if agent in names else len(names))
    return loss_mask_of(batch) * own


def share_of(batch: Mapping[str, Any], agent: str) -> dict[str, Any]:
    """A batch that scores only the tokens of an agent, and ends contexts at its last one."""
    scored = tokens_of(batch, agent)
    contexts = batch.get("context_ids", torch.zeros_like(batch["turn_ids"])).abs()
    places = torch.arange(1, scored.size(1) + 1, device=scored.device).expand_as(contexts)
    last = places.new_zeros(len(scored), int(contexts.max()) + 1).scatter_reduce(1, contexts, places * scored, "amax")
    read = batch["completion_mask"] * (places <= last.gather(1, contexts))
    return {**batch, "tool_mask": scored, "completion_mask": read}


class AgentEngine(Engine):
    """Samples each agent's turns with a separate engine, because keys and values depend on the weights."""

    def __init__(self, engines: Mapping[str, Engine], acting: Callable[[str], AbstractContextManager[None]]) -> None:
        self._engines, self._acting = engines, acting
        self.in_turns = any(engine.in_turns for engine in engines.values())

    def open(self, rows: int) -> None:
        for engine in self._engines.values():
            engine.memory_share = 1 / len(self._engines)
            engine.open(rows)
        self.window = min((e.window for e in self._engines.values() if e.window is not None), default=None)

    def of_agent(self, agent: str) -> Engine:
        """See `Engine.of_agent`. Raises ValueError for an agent without weights."""
        if agent not in self._engines:
            raise ValueError(f"The next turn is of the agent {agent!r}, but `agents` are {[*self._engines]}.")
        return self._engines[agent]

    def submit(self, *turn: Any, **options: Any) -> None:
        self.of_agent("").submit(*turn, **options)

    def poll(self) -> list[tuple[int, Generation]]:
        ended: list[tuple[int, Generation]] = []
        for agent, engine in self._engines.items():
            if not engine.idle:
                with self._acting(agent):
                    ended += engine.poll()
        return ended

    def release(self, row: int) -> None:
        for engine in self._engines.values():
            engine.release(row)

    @property
    def idle(self) -> bool:
        return all(engine.idle for engine in self._engines.values())

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
