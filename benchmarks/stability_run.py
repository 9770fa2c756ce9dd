"""One run of the stability benchmark: prepare a world and a policy, train, evaluate on an unseen world, record."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from examples.information_gain import InformationGain
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.common import QUIET
from benchmarks.stability_plan import GROUP, PPO_SETTINGS, BenchmarkMethod, Regime
from benchmarks.stability_report import LAST
from benchmarks.trust_plan import EVERY_METHOD, EVERY_REGIME, TrustConfig, TrustTrainer
from benchmarks.worlds.questions import POLICY, BenchmarkWorld, Score
from sorl_trl import SOGRPOConfig, SOGRPOTrainer, SOPPOConfig, SOPPOTrainer
from sorl_trl.experimental import GroupRefillConfig, GroupRefillTrainer, SeeUPOConfig, SeeUPOTrainer
from sorl_trl.files import write_whole
from sorl_trl.ops import importance_ratio, is_outside, kl_to_old, turn_ids_from_mask
from sorl_trl.qa import REWARDS

Callback = TypeVar("Callback", bound=TrainerCallback)
HARNESS = 3
"""Of this code: runs of another one sampled other answers in their evaluations."""
EVERY = 5
"""Rollouts between two evaluations before the last ones, which are all evaluated."""
GREEDY = GenerationConfig(do_sample=False)
SAMPLED = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
EXTREMES = {"grad_norm": ("max",), "kl_to_old": ("max", "median"), "clip_fraction/token": ("max",)}
"""Metrics whose updates are summarized by more than their mean."""


@dataclass(frozen=True)
class Job:
    """A run: what is trained how, with which seed."""

    regime: str
    method: str
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.regime}-{self.method}-{self.learning_rate:g}-{self.seed}"


def regime_of(job: Job) -> Regime:
    """Its regime, as its method is trained in it."""
    regime, passes = EVERY_REGIME[job.regime], EVERY_METHOD[job.method].passes
    if passes == "one":
        return replace(regime, minibatch=regime.trajectories, epochs=1)
    return replace(regime, epochs=regime.world.most_turns) if passes == "turns" else regime


def followed_by(job: Job) -> Job:
    """The run whose learning rates it takes: its own, or that of the method it follows."""
    return replace(job, method=EVERY_METHOD[job.method].follows or job.method)


def settings_of(job: Job) -> str:
    """All that decides a run besides the code: a record made with other settings is of another run."""
    regime, method = regime_of(job), EVERY_METHOD[job.method]
    parts = (regime.updates, regime.trajectories, regime.minibatch, regime.rollouts, regime.staleness)
    pieces = replace(method.method, source="")  # whose wording decides nothing
    described = (parts, regime.world.name, regime.world.settings, method.trainer, pieces)
    more = (method.reward, method.gain, method.follows, regime.against_sampler)
    return repr((*described, sorted(own_settings(method).items()), *more))


def own_settings(method: BenchmarkMethod) -> dict[str, Any]:
    """The fields of its trainer's config that are not the regime's."""
    return (PPO_SETTINGS if method.family == "ppo" else {"num_generations": GROUP}) | method.settings


class MeasuredGRPOTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` as it is, which also logs our metrics."""

    _logps: Tensor

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._logps = result[0].detach()
        return result

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss = super()._compute_loss(model, inputs)
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        for name, value in self._measure(self._logps - inputs["old_per_token_logps"], mask.bool()).items():
            self._metrics["train"][name].append(value)
        return loss

    @torch.no_grad()
    def _measure(self, log_ratio: Tensor, mask: Tensor) -> dict[str, float]:
        """What our trainers log of a micro-batch: (B, T) log-ratios, and where tokens are the policy's."""
        of_turns = importance_ratio(log_ratio, turn_ids_from_mask(mask), "turn", "geometric")[mask]
        outside = is_outside(log_ratio.float().exp(), self.epsilon_low, self.epsilon_high)[mask]
        kl = kl_to_old(log_ratio, mask, "unbiased")[mask.any(1)]
        if not len(of_turns):
            return {}
        return {
            "kl_to_old": float(kl.mean()),
            "clip_fraction/token": float(outside.float().mean()),
            "turns/ratio_min": float(of_turns.min()),
            "turns/ratio_max": float(of_turns.max()),
        }


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
            scores = {"sampled_em": self._score(model, SAMPLED), "greedy_em": self._score(model, GREEDY)}
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


class AgainstSampler(SOGRPOTrainer):
    """Compares the policy with the engine's log-probabilities, as asynchronous trainers do."""

    def _apply_method(self, rollout: Any) -> Any:
        batch = rollout.batch
        sampled, own = batch["sampling_per_token_logps"], batch["old_per_token_logps"]
        batch["old_per_token_logps"] = torch.where(sampled.isnan(), own, sampled)
        return super()._apply_method(rollout)


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


TRAINERS: dict[str, tuple[Any, Any]] = {
    "trl": (MeasuredGRPOTrainer, GRPOConfig),
    "so_grpo": (SOGRPOTrainer, SOGRPOConfig),
    "so_ppo": (SOPPOTrainer, SOPPOConfig),
    "seeupo": (SeeUPOTrainer, SeeUPOConfig),
    "group_refill": (GroupRefillTrainer, GroupRefillConfig),
    "against_sampler": (AgainstSampler, SOGRPOConfig),
    "trust": (TrustTrainer, TrustConfig),
}


def build_trainer(job: Job, folder: Path, output: Path) -> Any:
    """The trainer of a job, ready to train in the world that `prepare` made in `folder`."""
    regime, method = regime_of(job), EVERY_METHOD[job.method]
    details = {} if method.trainer == "trl" else {"log_turn_details": True}
    own = {"output_dir": str(output), "seed": job.seed, "learning_rate": job.learning_rate, **details}
    if regime.against_sampler:
        method, own = replace(method, trainer="against_sampler"), own | {"router_aux_loss_coef": 0.0}
    trainer = trainer_of(regime, method, folder, own)
    record = json.loads((output.parent / followed_by(job).name / "record.json").read_text()) if method.follows else {}
    trainer.add_callback(Rates(record.get("rates", ())))
    if regime.staleness:
        LateRollouts(trainer, regime.staleness)
    return trainer


def trainer_of(regime: Regime, method: BenchmarkMethod, folder: Path, own: Mapping[str, Any]) -> Any:
    """A method's trainer in a regime; `own` are the fields of its config that neither of them sets."""
    trainer_class, config_class = TRAINERS[method.trainer]
    config = config_class(
        lr_scheduler_type="constant",
        per_device_train_batch_size=regime.minibatch,
        steps_per_generation=regime.trajectories // regime.minibatch,
        num_iterations=regime.epochs,
        max_steps=regime.rollouts * regime.updates,
        max_completion_length=regime.world.max_completion_length,
        gradient_checkpointing=False,
        logging_steps=1,
        **QUIET,
        **own,
        **own_settings(method),
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / POLICY)
    return trainer_class(
        model=str(folder / POLICY),
        args=config,
        processing_class=tokenizer,
        callbacks=[Examiner(regime, regime.world.examination(folder, tokenizer))],
        **({} if method.trainer in ("trl", "seeupo") else {"method": method.method}),
        **regime.world.trainer_arguments(folder) | rewards_of(method),
    )


def callback_of(trainer: Any, kind: type[Callback]) -> Callback:
    return next(each for each in trainer.callback_handler.callbacks if isinstance(each, kind))


def evaluations_of(trainer: Any) -> list[dict[str, float]]:
    """What its examiner has found."""
    return callback_of(trainer, Examiner).evaluations


def rewards_of(method: BenchmarkMethod) -> dict[str, Any]:
    """The reward functions of a method that does not take the world's."""
    if not method.reward:
        return {}
    outcome = REWARDS[method.reward]
    return {"reward_funcs": [outcome, InformationGain(column="golden_answers")] if method.gain else outcome}


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
    regime = regime_of(job)
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
        "world": regime.world.name,
        "policy_parameters": trainer.model.num_parameters(),
        "settings": settings_of(job),
        "harness": HARNESS,
        "seconds": round(time.process_time() - started, 1),
        "evaluations": evaluations_of(trainer),
        "rollouts": summarize_rollouts(log, regime.updates),
        "rates": callback_of(trainer, Rates).taken,
        "error": error,
    }
    write_whole(target / "record.json", json.dumps(record).encode())
    return record
