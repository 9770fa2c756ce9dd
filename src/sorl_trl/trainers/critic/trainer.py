"""A turn-level trainer whose policy carries a critic: built, optimized, saved and resumed with it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers.trainer_utils import HubStrategy
from trl import GRPOTrainer
from trl.trainer.callbacks import SyncRefModelCallback

from sorl_trl.command_line import UserMistake
from sorl_trl.trainers.base_trainer import TurnLevelTrainer
from sorl_trl.trainers.checks.trl_arguments import called_as
from sorl_trl.trainers.critic.adapter import CRITIC_ADAPTER, AdapterCritic, without_adapter
from sorl_trl.trainers.critic.build import causal_lm_of, check_trained_dtypes, setup_critic
from sorl_trl.trainers.critic.checkpoint import (
    CRITIC_FOLDER,
    check_critic_folder,
    restore_critic,
    save_critic,
)
from sorl_trl.trainers.critic.model import CRITIC_ATTRIBUTE, Critic, detached_critic, is_critic_name
from sorl_trl.trainers.so_ppo_config import SOPPOConfig

logger = get_logger(__name__)


class CriticTrainer(TurnLevelTrainer):
    """`TurnLevelTrainer` with a critic among the policy's submodules, which nobody but the trainer gets to see.

    Checkpoints hold the policy as if it had none, and the critic in `critic/` beside it.
    """

    args: SOPPOConfig
    beta: float
    critic: Critic

    @called_as(GRPOTrainer.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled:
            _check_deepspeed_config(self.accelerator.state.deepspeed_plugin.deepspeed_config)
        if self.lr_scheduler is not None:
            raise ValueError(
                "`optimizers` holds a scheduler, which was made for an optimizer without the critic. Give the "
                "optimizer alone, and choose a schedule by `lr_scheduler_type`."
            )
        self.critic = setup_critic(self.model, self.args, len(self._tokenizer))
        if self._dist.is_zero3:
            check_trained_dtypes(self.model)
        if self.use_vllm:
            self.vllm_generation._iter_named_params = _without_critic(self.vllm_generation._iter_named_params)
        if self.args.sync_ref_model:
            self.remove_callback(SyncRefModelCallback)
            self.add_callback(_PolicySync(self.ref_model, self.accelerator))

    # ---------------------------------------------------------------------------------------------------------------
    # Optimizer
    # ---------------------------------------------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """TRL's optimizer, with the critic's parameters in groups of their own learning rate."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if any(group.get("critic") for group in optimizer.param_groups):
            return optimizer
        missing = {id(p): p for p in self.critic.own_parameters()}
        for group in list(optimizer.param_groups):
            own = [p for p in group["params"] if id(p) in missing]
            group["params"] = [p for p in group["params"] if id(p) not in missing]
            if own:
                self._add_critic_group(optimizer, {**group, "params": own})
            for parameter in own:
                del missing[id(parameter)]
        if missing:  # the user's own optimizer was made before there was a critic
            has_names = "param_names" in optimizer.param_groups[0]
            names = {id(p): name for name, p in self.model.named_parameters()}
            params = [(names[i], p) if has_names else p for i, p in missing.items()]
            self._add_critic_group(optimizer, {"params": params})
        return optimizer

    def _add_critic_group(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        optimizer.add_param_group({**group, "lr": self.args.critic_learning_rate, "critic": True})

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """TRL's scheduler, with a learning rate of 0 for the policy during the critic's warm-up."""
        is_new = self.lr_scheduler is None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        warmup = self.args.critic_warmup_steps
        if warmup == 0 or not is_new:
            return scheduler
        if warmup >= num_training_steps:
            logger.warning(
                f"`critic_warmup_steps` is {warmup}, and training has {num_training_steps} steps: the policy will not "
                "be trained."
            )
        if not isinstance(scheduler, LambdaLR):
            raise UserMistake(
                f"`critic_warmup_steps` is {warmup}, but `lr_scheduler_type={self.args.lr_scheduler_type!r}` cannot "
                "keep the policy's learning rate at 0 meanwhile. Use one such as 'constant', 'linear' or 'cosine'."
            )
        for i, group in enumerate(scheduler.optimizer.param_groups):
            if not group.get("critic"):
                scheduler.lr_lambdas[i] = _after_warmup(scheduler.lr_lambdas[i], warmup)
                group["lr"] = scheduler.base_lrs[i] * scheduler.lr_lambdas[i](0)
        scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
        return scheduler

    # ---------------------------------------------------------------------------------------------------------------
    # Checkpoints
    # ---------------------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self.critic.unfreeze()  # under ZeRO-3, only what requires a gradient is gathered
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        output_dir = output_dir if output_dir is not None else self.args.output_dir
        if self.args.should_save:
            save_critic(self.critic, self.model, Path(output_dir) / CRITIC_FOLDER, state_dict)
        # PEFT tells adapters apart by those it knows of, and in there it does not know of the critic's.
        state_dict = self.model.state_dict() if state_dict is None else state_dict
        state_dict = {name: tensor for name, tensor in state_dict.items() if not is_critic_name(name)}
        with self._policy_alone():
            super()._save(output_dir, state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint) / CRITIC_FOLDER
        check_critic_folder(self.critic, folder)
        with self._policy_alone():
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        restore_critic(self.critic, self.model, folder)
        self.critic.unfreeze()

    def _load_best_model(self) -> None:
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:  # they load their own checkpoint, critic included
            super()._load_best_model()
            return
        with self._policy_alone():
            super()._load_best_model()
        restore_critic(self.critic, self.model, Path(self.state.best_model_checkpoint) / CRITIC_FOLDER)
        self.critic.unfreeze()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:  # DeepSpeed has by now loaded all weights, without `_load_from_checkpoint`
            check_critic_folder(self.critic, Path(checkpoint) / CRITIC_FOLDER)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # transformers copies the checkpoint's files of names that it knows into the output folder, and pushes that.
        if self.is_world_process_zero() and self.args.hub_strategy != HubStrategy.END:
            shutil.copytree(
                Path(checkpoint_folder) / CRITIC_FOLDER,
                Path(self.args.output_dir) / CRITIC_FOLDER,
                dirs_exist_ok=True,
            )
        super()._push_from_checkpoint(checkpoint_folder)

    def detach_critic(self) -> Any:
        """Take the critic out of the model for good, and return the model: the policy alone, as TRL made it.

        For whatever does not go through the trainer, such as `merge_and_unload()`, the model's own
        `save_pretrained`, or another trainer. This trainer cannot train or save after it.
        """
        model = self.accelerator.unwrap_model(self.model)
        del causal_lm_of(model)._modules[CRITIC_ATTRIBUTE]
        if isinstance(self.critic, AdapterCritic):
            model.delete_adapter(CRITIC_ADAPTER)
        return model

    @contextmanager
    def _policy_alone(self) -> Iterator[None]:
        with detached_critic(causal_lm_of(self.model)), without_adapter(self.model):
            yield


def _check_deepspeed_config(config: dict[str, Any]) -> None:
    """Raise ValueError where DeepSpeed would build what gives the critic a learning rate of its own."""
    for name in ("optimizer", "scheduler"):
        if name in config:
            raise UserMistake(
                f"The DeepSpeed configuration has {name!r}: {config[name]}, with one learning rate for the policy and "
                "the critic. Remove it from there; `optim`, `learning_rate`, `critic_learning_rate` and "
                "`lr_scheduler_type` of `SOPPOConfig` take its place."
            )


def _after_warmup(schedule: Callable[[int], float], warmup: int) -> Callable[[int], float]:
    return lambda step: 0.0 if step < warmup else schedule(step)


def _without_critic(iterate: Callable[[], Iterator[tuple[str, Any]]]) -> Callable[[], Iterator[tuple[str, Any]]]:
    """The parameters that the inference engine is sent, less the critic's, which its model does not have."""

    def policy_params() -> Iterator[tuple[str, Any]]:
        return ((name, parameter) for name, parameter in iterate() if not is_critic_name(name))

    return policy_params


class _PolicySync(SyncRefModelCallback):
    """`SyncRefModelCallback` pairs the parameters of two models one by one: the reference has no critic."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with detached_critic(causal_lm_of(self.accelerator.unwrap_model(kwargs["model"]))):
            super().on_step_end(args, state, control, **kwargs)
