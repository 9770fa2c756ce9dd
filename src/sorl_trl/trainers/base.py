"""`trl.GRPOTrainer` with turns, a method of pieces and exact resume; `SOGRPOTrainer` is its default setup.

TRL 1.16's private methods are overridden narrowly: `super()` plus what differs. docs/internals/architecture.md lists
them, and tests/contract/test_trl_seams.py fails when one of their bodies changes. The work is done in the modules that
these methods call, with a `Host` in place of the trainer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.extras.profiling import profiling_decorator
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import shuffle_sequence_dict, split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from sorl_trl.diagnostics.callbacks import TurnProgressCallback
from sorl_trl.files import raise_if_disk_full
from sorl_trl.methods import ClipPenalty, Method, MicroBatch, ScoredRollout, method_from
from sorl_trl.methods.method import Credit
from sorl_trl.ops import masked_mean, turn_broadcast, turn_layout
from sorl_trl.rollout.agent_rollout import tools_as_rollout
from sorl_trl.rollout.chat import ensure_response_template
from sorl_trl.rollout.policy_rollout import PolicyRollout
from sorl_trl.rollout.protocol import MessageReader
from sorl_trl.rollout.routing import asks_for_routes
from sorl_trl.trainers.batch import micro_batches
from sorl_trl.trainers.checkpoint import (
    Continuation,
    EpochRepeatSampler,
    load_cycle,
    load_weights,
    resume_point,
    save_cycle,
)
from sorl_trl.trainers.checks import (
    check_ahead,
    check_config,
    check_dataset,
    check_names,
    check_trained,
    check_trust_region,
    disable_noise,
    warn_on_main_process,
)
from sorl_trl.trainers.config import SOGRPOConfig, TurnLevelConfig
from sorl_trl.trainers.forward import Forward, Pass
from sorl_trl.trainers.host import Host
from sorl_trl.trainers.late_rollouts import RolloutsAhead
from sorl_trl.trainers.loss import micro_batch, policy_loss
from sorl_trl.trainers.metrics import MetricLog, TrajectoryDump
from sorl_trl.trainers.optimizer_step import KLControl, bias_normalizer, check_optimizers
from sorl_trl.trainers.pack import Rollout, kept, log_table, pack
from sorl_trl.trainers.returned import check_callable
from sorl_trl.trainers.rewards import HeldOut, RewardWatch, rewarding_turns, score
from sorl_trl.trainers.samples import Sample, sample
from sorl_trl.trainers.vllm_policy import used_by_trl


class TurnLevelTrainer(GRPOTrainer):
    """A `GRPOTrainer` that records turns and takes its advantages and loss from a `Method`."""

    config_class: ClassVar[type[TurnLevelConfig]] = TurnLevelConfig
    default_method: ClassVar[Mapping[str, Any]] = {"terms": (ClipPenalty(),)}
    """Without `method`, pieces beside those that the config describes."""
    args: TurnLevelConfig
    method: Method
    reward_funcs: list[Any]
    rollout_func: Any
    _paper: dict[str, str] = {}  # noqa: RUF012 - TRL's is not a ClassVar
    """TRL's model card names no paper."""
    rollout_examples: list[dict[str, Any]] | None = None
    """The rows of the dataset in the last rollout, for a `rollout_func` that needs more than prompts."""
    _ahead: RolloutsAhead | None = None
    _buffered_inputs: Any
    _tokenizer: Any
    _has_critic: ClassVar[bool] = False

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: TurnLevelConfig | None = None,
        *positional: Any,
        method: Method | str | Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        name = model if isinstance(model, str) else model.config._name_or_path
        if args is None:
            args = self.config_class(f"{name.split('/')[-1]}-{type(self).__name__.removesuffix('Trainer')}")
        check_config(self.config_class, args)
        self.method = self.method_for(method, args)
        args.method_name = self.method.describe()
        bound = inspect.signature(super().__init__).bind(model, reward_funcs, args, *positional, **named)
        given = tools_as_rollout(bound.arguments)
        args = given["args"]
        if isinstance(rollout := given.get("rollout_func"), PolicyRollout):
            rollout.check(args)
            if rollout.shows_tools:
                given["processing_class"] = ensure_response_template(name, given, args.trust_remote_code)
        with used_by_trl(asks_for_routes(args)):
            super().__init__(**given)
        bars = [each for each in self.callback_handler.callbacks if type(each) is DEFAULT_PROGRESS_CALLBACK]
        for bar in bars:  # it would print dozens of metrics at each step; a user's own subclass stays
            self.remove_callback(bar)
            self.add_callback(TurnProgressCallback)
        self._tokenizer = MessageReader(self._tokenizer)  # with which TRL parses whatever the policy writes
        if args.disable_dropout:
            disable_noise(self.model)
        self._host = host = Host(self)
        check_optimizers(self.optimizer, self.lr_scheduler, self.method.target_kl)
        if isinstance(rollout, PolicyRollout):
            rollout.check_tokenizer(self)
        if args.async_staleness:
            check_ahead(host)
            by_completion = args.async_order == "completed"
            self._ahead = RolloutsAhead(host, self.rollout_func, args.async_staleness, by_completion)
        check_callable(self.rollout_func)
        check_dataset(host)
        check_trust_region(host)
        if args.async_staleness:
            self.vllm_importance_sampling_correction = False  # ratios already contain what it would correct
        self._forward = Forward(host)
        self._set_up_rewards()
        self._bias_normalizer, self._metric_log = bias_normalizer(host), MetricLog(host)
        self._reward_watch = RewardWatch(warn=partial(warn_on_main_process, args), by_group=not self._has_critic)
        self._held_out = HeldOut()
        self._dump = TrajectoryDump(args, self._tokenizer)
        self.add_callback(self._dump)
        target = 0.0 if args.is_on_policy else self.method.target_kl  # without a KL, it would keep the first factor
        self._kl_control = KLControl(target, lambda factor: self._metrics["train"]["lr_factor"].append(factor))
        self.add_callback(self._kl_control)
        self.add_callback(Continuation(self._ahead))

    @classmethod
    def method_for(cls, method: Method | str | Mapping[str, Any] | None, args: TurnLevelConfig) -> Method:
        """The method of a trainer with these arguments. Raises ValueError if it does not fit them."""
        found = method_from(cls.default_method if method is None else method, args)
        found.check(args, cls._has_critic)
        return found

    def _set_up_rewards(self) -> None:
        for function in self.reward_funcs:
            if hasattr(function, "attach"):
                function.attach(self)
        named = enumerate(zip(self.reward_funcs, self.reward_func_names, strict=True))
        self.reward_funcs = [rewarding_turns(function, index, name) for index, (function, name) in named]

    # ---------------------------------------------------------------------------------------------------------------
    # The rollout
    # ---------------------------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Make one rollout: from rows of the dataset to the tensors that training reads."""
        rollout = self._collect(inputs)
        if self.model.training:
            self._reward_watch.observe(rollout.scored)
        else:
            self._held_out.observe(rollout.samples, rollout.scored)
        advantages = self._apply_method(rollout)
        log_table(self._host, rollout, advantages)
        self._dump.prepare(rollout)
        rollout.batch["turn_counts"] = turn_layout(rollout.batch["turn_ids"]).counts.cpu()
        return rollout.batch

    def _collect(self, inputs: list[dict[str, Any]]) -> Rollout:
        """A trajectory for each of this process's rows of the dataset, as tensors, with its scores."""
        check_names(self._host, "The dataset", inputs[0])  # those of a stream are known only now
        return pack(self._host, *self._sample(inputs))

    def _sample(self, rows: list[dict[str, Any]]) -> tuple[list[Sample], ScoredRollout]:
        """Trajectories with their rewards, and what all processes know about them."""
        self.rollout_examples = [dict(row) for row in rows]
        samples = sample(self._host, rows)
        return samples, score(self._host, samples)

    @profiling_decorator  # type: ignore[untyped-decorator]
    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """The next micro-batch, from a new rollout once all updates on the last one are done, as in TRL."""
        if not self.model.training:
            return self._generate_and_score_completions(generation_batch)
        count = int(self.args.steps_per_generation)
        if self._step % self.args.cycle_steps == 0 or self._buffered_inputs is None:
            batch = self._generate_and_score_completions(generation_batch)
            shuffled = shuffle_sequence_dict(split_pixel_values_by_grid(batch))
            per_step, processes = min(self.args.gradient_accumulation_steps, count), self.accelerator.num_processes
            split = micro_batches(shuffled, count, per_step, "tree" in self._forward.layouts, processes)
            self._buffered_inputs = [unsplit_pixel_values_by_grid(each) for each in split]
        return self._buffered_inputs[self._step % count]

    @torch.no_grad()
    def _score(self, model: Any, batch: Mapping[str, Any], values: bool = False) -> Pass:
        """A pass without gradients, in chunks of the per-device batch size. All processes call it together."""
        args = self.args
        rows = args.per_device_train_batch_size if self.model.training else args.per_device_eval_batch_size
        with disable_gradient_checkpointing(self.model, args.gradient_checkpointing_kwargs):
            return self._forward(model, batch, values=values, rows=rows)

    def _apply_method(self, rollout: Rollout) -> Tensor:
        """Drop what is not kept, and put advantages into the batch; return (N,) advantages to display."""
        if self.model.training:
            rollout.drop(kept(self._host, rollout))
        return self._set_advantages(rollout)

    def _set_advantages(self, rollout: Rollout) -> Tensor:
        """Put the method's advantages into the batch; return (N,) advantages to display."""
        advantages: Tensor = cast(Credit, self.method.credit)(rollout.scored)
        if advantages.dim() == 1:
            rollout.batch["advantages"] = rollout.own(advantages)
            return advantages
        rollout.batch["advantages"] = turn_broadcast(rollout.own(advantages), rollout.batch["turn_ids"])
        return masked_mean(advantages, rollout.scored.turn_mask, dim=1)

    # ---------------------------------------------------------------------------------------------------------------
    # The loss
    # ---------------------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """One forward pass and one loss, then terms, metrics and observers."""
        asked = {"entropies": True, "router": self.aux_loss_enabled, "values": self._has_critic}
        scores = self._forward(model, inputs, **asked)
        settings = self._host.loss_settings()
        batch = micro_batch(settings, scores.logps, inputs)
        loss, objective, metrics = policy_loss(settings, batch, scores)
        metrics |= scores.metrics
        terms = [*(term(batch) for term in self.method.terms), self._own_term(batch, scores)]
        for value, term_metrics in terms:
            loss = loss + value / settings.micro_batches
            metrics |= term_metrics
        kl = self._metric_log.observe(batch, objective, metrics)
        self._dump.observe(batch, objective)
        if self._bias_normalizer is not None:
            self._bias_normalizer.observe(settings, batch, objective)
        self._kl_control.observe(batch, kl)
        return loss

    def _own_term(self, batch: MicroBatch, scores: Pass) -> tuple[Tensor | float, dict[str, Any]]:
        """The term that a subclass adds to the loss: a mean over the micro-batch's trajectories, and metrics."""
        return 0.0, {}

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        self._metric_log.shorten()
        if not self.model.training:
            line = self._held_out.compare(self._metric_log.name_dataset(logs), self.state.global_step)
            if line and self.accelerator.is_main_process:
                tqdm.write(line)
        super().log(logs, *args, **kwargs)

    def _clip_grad_norm(self, model: Any) -> Any:
        self._normalize_gradient()
        return super()._clip_grad_norm(model)

    def _normalize_gradient(self) -> None:
        """Divide the gradient of a step by what clipping has removed, with `bias_norm`."""
        if self._bias_normalizer is not None:
            self._metrics["train"]["clipping_bias_norm"].append(self._bias_normalizer.normalize(self.accelerator))

    # ---------------------------------------------------------------------------------------------------------------
    # The generation cycle, and checkpoints that keep it
    # ---------------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        check_trained(self.model)
        checkpoint = resume_point(self.args, resume_from_checkpoint)
        # Replace both, because a run that was interrupted within a step leaves values in them.
        self._metric_log, self._bias_normalizer = MetricLog(self._host), bias_normalizer(self._host)
        self._step, self._buffered_inputs = 0, None  # an earlier run's rollout counts the steps of that run
        if self.args.is_on_policy:
            warn_on_main_process(
                self.args,
                f"Updates per rollout: {self.args.updates_per_rollout:g}, so every importance ratio is 1 and nothing "
                "is clipped. Set `steps_per_generation` or `num_iterations` for more.",
            )
        with nullcontext() if self._ahead is None else self._ahead.running():
            if checkpoint is not None:
                self._load_cycle(Path(checkpoint))
            return super().train(checkpoint, *args, **kwargs)

    def _load_cycle(self, checkpoint: Path) -> None:
        load_cycle(self._host, checkpoint)

    def _get_train_sampler(self, dataset: Any = None) -> EpochRepeatSampler:
        return EpochRepeatSampler.like(super()._get_train_sampler(dataset))

    def _run_epoch(self, **given: Any) -> None:
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(**given)
        else:  # a finished run was resumed
            self.control.should_training_stop = True

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if not self.args.save_only_model:
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            folder = Path(self._get_output_dir(trial=trial)) / name
            save_cycle(self._host, folder)
        # transformers writes the trainer's state last, so a checkpoint that has it is complete.
        with raise_if_disk_full(Path(self.args.output_dir)):
            super()._save_checkpoint(model, trial)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load = partial(super()._load_from_checkpoint, resume_from_checkpoint, model)
        self._load_weights(resume_from_checkpoint, load)

    def _load_best_model(self) -> None:
        self._load_weights(str(self.state.best_model_checkpoint), super()._load_best_model)

    def _load_weights(self, checkpoint: str, load: Callable[[], None]) -> None:
        """Load a checkpoint's weights; `load` is how transformers does it."""
        load_weights(self._host, checkpoint, load)


class SOGRPOTrainer(TurnLevelTrainer):
    """Drop-in replacement for `trl.GRPOTrainer` with turns as the unit of the loss.

    It takes the arguments of `GRPOTrainer` and `method`: a `sorl_trl.Method` or a name in `sorl_trl.methods.METHODS`,
    which is the whole algorithm, or a mapping of pieces that replace those that `args` describe. By default, this is
    SO-GRPO: what `args` describe, with a KL penalty (`ClipPenalty`).

    A reward function may return one float per turn of a completion. Turns are those that `rollout_func` records as
    `turn_ids`, or else the runs of model tokens in its `env_mask`. With only outcome rewards and `gamma=1`, the
    advantages are TRL's own. `tools` and `environment_factory` become an `AgentRollout(ToolBox(…))`.

    Ratios, clipping and `target_kl` take effect from the second update on a rollout. TRL's defaults make only one, and
    the trainer warns: set `steps_per_generation` above `gradient_accumulation_steps`, or `num_iterations` above 1.

    Example:

    ```python
    trainer = SOGRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        args=SOGRPOConfig(output_dir="out", steps_per_generation=8),  # 8 updates per rollout
        train_dataset=dataset,
    )
    trainer.train()
    ```

    Raises:
        TypeError: `args` is not a `SOGRPOConfig`.
        ValueError: The method does not fit `args`; masks, ids and turn ids of a rollout do not match; or a
            reward function returns the wrong number of turn rewards.
    """

    config_class: ClassVar[type[TurnLevelConfig]] = SOGRPOConfig
    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "so-grpo"]
    _name = "SO-GRPO"
