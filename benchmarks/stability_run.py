"""One run of the stability benchmark: prepare a world and a policy, train, evaluate on an unseen world, record."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, TrainerCallback
from trl import GRPOTrainer

from benchmarks.common import QUIET
from benchmarks.stability_plan import ARMS, COLUMNS, GROUP, PPO_SETTINGS, BenchmarkMethod, Regime
from benchmarks.stability_report import LAST
from benchmarks.worlds.questions import POLICY, BenchmarkWorld, Score
from sorl_trl import SOGRPOConfig, SOGRPOTrainer, SOPPOConfig, SOPPOTrainer
from sorl_trl.files import write_whole
from sorl_trl.ops import kl_controlled_factor, kl_to_old
from sorl_trl.trainers.optimizer_step import KL_FACTOR, KLControl

Callback = TypeVar("Callback", bound=TrainerCallback)
EVERY = 5
"""Rollouts between two evaluations before the last ones, which are all evaluated."""
GREEDY = GenerationConfig(do_sample=False)


def sampled_at(temperature: float) -> GenerationConfig:
    return GenerationConfig(do_sample=True, temperature=temperature, top_k=0, top_p=1.0)


SAMPLED = sampled_at(1.0)
EXTREMES = {"grad_norm": ("max",), "kl_to_old": ("max", "median"), "clip_fraction/token": ("max",)}
"""Metrics whose updates are summarized by more than their mean."""


@dataclass(frozen=True)
class Job:
    """A run: what is trained how, with which seed."""

    column: str
    arm: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.column}-{self.arm}-{self.rate:g}-{self.seed}"


def prepare(world: BenchmarkWorld, seed: int, folder: Path) -> Path:
    """The data and the policy of a seed, made once."""
    torch.set_num_threads(1)
    return world.prepare(seed, folder)


class Examiner(TrainerCallback):
    """Examines the policy, on tasks that it has never seen, after some of the rollouts."""

    def __init__(self, regime: Regime, score: Score) -> None:
        self._regime = regime
        self._score = score
        self.evaluations: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._examine(model, 0)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        rollout, rest = divmod(state.global_step, self._regime.updates)
        if rest == 0 and (rollout % EVERY == 0 or rollout > self._regime.rollouts - LAST):
            self._examine(model, rollout)

    def _examine(self, model: Any, rollout: int) -> None:
        was_training = model.training
        model.eval()
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(rollout)
            scores = {"sampled_em": self._score(model, sampled_at(self._regime.temperature))}
            if self._regime.is_scored_greedily:
                scores["greedy_em"] = self._score(model, GREEDY)
        model.train(was_training)
        self.evaluations.append({"rollout": rollout, **scores})


class Rates(TrainerCallback):
    """Writes down the policy's learning rate of every update, after setting it to that of `followed`, if any."""

    def __init__(self, followed: Sequence[float] = ()) -> None:
        self._followed = followed
        self.taken: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if self._followed:
            for group in optimizer.param_groups:
                group["lr"] = self._followed[state.global_step]

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.taken.append(optimizer.param_groups[0]["lr"])


class AgainstSampler:
    """Has a trainer compare the policy with the engine's log-probabilities, as asynchronous trainers do."""

    def _apply_method(self, rollout: Any) -> Any:
        batch = rollout.batch
        sampled, own = batch["sampling_per_token_logps"], batch["old_per_token_logps"]
        batch["old_per_token_logps"] = torch.where(sampled.isnan(), own, sampled)
        return super()._apply_method(rollout)  # type: ignore[misc]


class EarlierControl(KLControl):
    """That of version 0.3: the KL counts per token, a run begins at the full rate, and noise counts as movement.

    For processes of one micro-batch per update.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._scale(getattr(self._scheduler, KL_FACTOR), 1.0)

    def observe(self, batch: Any, kl: Any) -> None:
        if batch.is_training and batch.has_moved:
            kls = kl_to_old(batch.log_ratio.detach(), batch.loss_mask, "unbiased")[batch.turns.counts > 0]
            before: float = getattr(self._scheduler, KL_FACTOR)
            self._scale(before, kl_controlled_factor(before, float(kls.mean()), self.target_kl))


class ControlledAsBefore:
    """Gives a trainer the control of version 0.3."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        ours: Any = self
        ours.remove_callback(ours._kl_control)
        ours._kl_control = EarlierControl(ours.method.target_kl, lambda factor: None)
        ours.add_callback(ours._kl_control)


class LateRollouts:
    """Has a trainer train on each rollout after it has collected `staleness` later ones.

    Old log-probabilities are those of the policy that sampled. The lag grows to `staleness` at the start, while each
    batch of prompts is asked twice. Nothing of it is in a checkpoint.

    Args:
        trainer: a `GRPOTrainer`, whose `_prepare_inputs` this replaces.
        staleness: how many rollouts late each is trained on.
    """

    def __init__(self, trainer: GRPOTrainer, staleness: int) -> None:
        self.waiting: deque[list[dict[str, Tensor]]] = deque()
        """Rollouts that later ones must be collected before, each split into micro-batches, the oldest first."""
        self._trainer, self._staleness, self._prepare = trainer, staleness, trainer._prepare_inputs
        trainer._prepare_inputs = self

    def __call__(self, generation_batch: Any) -> Any:
        """The next micro-batch to train on."""
        trainer = self._trainer
        steps = trainer.args.steps_per_generation * trainer.num_iterations
        if not trainer.model.training or (trainer._step % steps and trainer._buffered_inputs):
            return self._prepare(generation_batch)
        for _ in range(1 if len(self.waiting) == self._staleness else 2):
            trainer._buffered_inputs = None
            self._prepare(generation_batch)
            for batch in trainer._buffered_inputs:
                if "old_per_token_logps" not in batch:  # TRL needs none where a rollout makes one update
                    batch["old_per_token_logps"] = trainer._score(trainer.model, batch).logps
            self.waiting.append(trainer._buffered_inputs)
        trainer._buffered_inputs = self.waiting.popleft()
        return trainer._buffered_inputs[trainer._step % trainer.args.steps_per_generation]


def build_trainer(job: Job, folder: Path, output: Path) -> Any:
    """The trainer of a job, ready to train in the world that `prepare` made in `folder`."""
    regime, method = COLUMNS[job.column], ARMS[job.arm]
    own = {"output_dir": str(output), "seed": job.seed, "learning_rate": job.rate, "log_turn_details": True}
    if regime.against_sampler:
        own["router_aux_loss_coef"] = 0.0
    trainer = trainer_of(regime, method, folder, own)
    followed = output.parent / Job(job.column, method.follows, job.rate, job.seed).name / "record.json"
    trainer.add_callback(Rates(json.loads(followed.read_text())["rates"] if method.follows else ()))
    if regime.staleness:
        LateRollouts(trainer, regime.staleness)
    return trainer


def trainer_of(regime: Regime, method: BenchmarkMethod, folder: Path, own: Mapping[str, Any]) -> Any:
    """A method's trainer in a regime; `own` are the fields of its config that neither of them sets."""
    trainer_class: Any = SOGRPOTrainer
    config_class: Any = SOGRPOConfig
    settings: dict[str, Any] = {"num_generations": GROUP}
    if method.method.needs_critic:
        trainer_class, config_class, settings = SOPPOTrainer, SOPPOConfig, PPO_SETTINGS
    changes = [AgainstSampler] * regime.against_sampler + [ControlledAsBefore] * method.has_earlier_control
    if changes:
        trainer_class = type(trainer_class.__name__, (*changes, trainer_class), {})
    config = config_class(
        lr_scheduler_type="constant",
        per_device_train_batch_size=regime.minibatch,
        steps_per_generation=regime.trajectories // regime.minibatch,
        num_iterations=regime.epochs,
        max_steps=regime.rollouts * regime.updates,
        max_completion_length=regime.world.max_completion_length,
        temperature=regime.temperature,
        gradient_checkpointing=False,
        logging_steps=1,
        **QUIET | {"bf16": regime.bf16},
        **own,
        **settings,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / POLICY)
    return trainer_class(
        model=str(folder / POLICY),
        args=config,
        processing_class=tokenizer,
        method=method.method,
        callbacks=[Examiner(regime, regime.world.examination(folder, tokenizer))],
        **regime.world.trainer_arguments(folder),
    )


def callback_of(trainer: Any, kind: type[Callback]) -> Callback:
    return next(each for each in trainer.callback_handler.callbacks if isinstance(each, kind))


def evaluations_of(trainer: Any) -> list[dict[str, float]]:
    """What its examiner has found."""
    return callback_of(trainer, Examiner).evaluations


def summarize_rollouts(log: Sequence[Mapping[str, Any]], updates: int) -> list[dict[str, float | None]]:
    """One row per rollout: the mean over its updates of every metric, and more of the `EXTREMES`."""
    rows = []
    for start in range(0, len(log), updates):
        entries = log[start : start + updates]
        row: dict[str, float | None] = {}
        for name in dict.fromkeys(key for entry in entries for key in entry if key not in ("step", "epoch")):
            values = [entry[name] for entry in entries if entry.get(name) is not None]
            row[name] = _rounded(_reduce(name, values)) if values else None
            for extreme in EXTREMES.get(name, ()):
                row[f"{name} {extreme}"] = _rounded(getattr(statistics, extreme, max)(values)) if values else None
        rows.append(row)
    return rows


def _reduce(name: str, values: Sequence[float]) -> float:
    if name.endswith("ratio_min"):
        return min(values)
    return max(values) if name.endswith("ratio_max") else statistics.fmean(values)


def _rounded(value: float) -> float | None:
    """Four digits; JSON has no infinity."""
    if math.isnan(value):
        return None
    return float(f"{min(max(value, -1e308), 1e308):.4g}")


def train(trainer: Any) -> str | None:
    """Train, and return the error of a run whose weights became NaN."""
    try:
        trainer.train()
    except RuntimeError as failure:
        if all(bool(weight.isfinite().all()) for weight in trainer.model.parameters()):
            raise
        return str(failure).splitlines()[0]
    return None


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Train and evaluate. A run whose weights become NaN has an `error` and counts as collapsed."""
    torch.set_num_threads(1)
    regime = COLUMNS[job.column]
    world = prepare(regime.world, job.seed, folder)
    target = folder / job.name
    started = time.process_time()
    trainer = build_trainer(job, world, target)
    error = train(trainer)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    target.mkdir(parents=True, exist_ok=True)
    (target / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
    record = {
        **asdict(job),
        "seconds": round(time.process_time() - started, 1),
        "evaluations": evaluations_of(trainer),
        "rollouts": summarize_rollouts(log, regime.updates),
        "rates": callback_of(trainer, Rates).taken,
        "error": error,
    }
    write_whole(target / "record.json", json.dumps(record).encode())
    return record
