"""One run of the stability benchmark: prepare a world and a policy, train, evaluate on an unseen world, record."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks import stability_grid, stability_methods, trial_methods
from benchmarks.candidates import CandidateConfig, CandidateTrainer
from benchmarks.method_settings import GROUP, PPO_SETTINGS
from benchmarks.stability_grid import Regime
from benchmarks.stability_statistics import LAST
from benchmarks.turn_length_grid import LENGTH_REGIMES
from benchmarks.worlds.world import POLICY, BenchmarkWorld, Examination
from sorl_trl import SeeUPOConfig, SeeUPOTrainer, SOGRPOConfig, SOGRPOTrainer, SOPPOConfig, SOPPOTrainer
from sorl_trl.diagnostics import DEFAULT_RULES, CollapseGuard, GuardSettings
from sorl_trl.ops import turn_ids_from_mask, turn_layout
from sorl_trl.qa import REWARDS
from sorl_trl.trainers.cycle.generation_cycle import GenerationCycle
from sorl_trl.trainers.loss.micro_batch import ClipRange, clip_ranges, loss_mask_of
from sorl_trl.trainers.loss.turn_metrics import turn_metrics

REGIMES = stability_grid.REGIMES | LENGTH_REGIMES
METHODS = stability_methods.METHODS | trial_methods.TRIALS | stability_methods.GUARDED
"""All that can be run, whichever report it is for."""
HARNESS = 3
"""Of this code: runs of another one sampled other answers in their evaluations (`stability_texts.py`)."""
EVERY = 5
"""Rollouts between two evaluations before that."""
GREEDY = GenerationConfig(do_sample=False)
SAMPLED = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
EXTREMES = {"grad_norm": ("max",), "kl_to_old": ("max", "median"), "clip_fraction/token": ("max",)}
"""Metrics whose updates are summarized by more than their mean."""


@dataclass(frozen=True)
class Job:
    regime: str
    method: str
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.regime}-{self.method}-{self.learning_rate:g}-{self.seed}"


def regime_of(job: Job) -> Regime:
    """Its regime, as its method is trained in it."""
    regime, passes = REGIMES[job.regime], METHODS[job.method].passes
    if passes == "one":
        return replace(regime, minibatch=regime.trajectories, epochs=1)
    return replace(regime, epochs=regime.world.most_turns) if passes == "turns" else regime


def settings_of(job: Job) -> str:
    """All that decides a run besides the code: a record made with other settings is of another run."""
    regime, method = regime_of(job), METHODS[job.method]
    parts = (regime.updates, regime.trajectories, regime.minibatch, regime.rollouts, regime.staleness)
    given = (PPO_SETTINGS if method.family == "ppo" else {}) | method.settings
    described = (parts, regime.world.name, regime.world.settings, method.trainer, sorted(given.items()))
    described += (method.reward,) if method.reward else ()
    return repr((*described, DEFAULT_RULES, GuardSettings(), method.guard) if method.guard else described)


class MeasuredGRPOTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` as it is, which also logs our metrics and can train on older rollouts."""

    _logps: torch.Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cycle = GenerationCycle(self)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return self.cycle.prepare_inputs(generation_batch, super()._prepare_inputs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._logps = result[0].detach()
        return result

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss = super()._compute_loss(model, inputs)
        turns = turn_layout(turn_ids_from_mask(loss_mask_of(inputs)))
        log_ratio = self._logps - inputs["old_per_token_logps"]
        ranges = clip_ranges(ClipRange(self.epsilon_low, self.epsilon_high), turns, "token", "none")
        metrics = turn_metrics(log_ratio, turns, inputs["advantages"].unsqueeze(1), ranges, "geometric")
        for name, value in metrics.reduce(self.accelerator).items():
            self._metrics["train"][name].append(value)
        return loss


TRAINERS: dict[str, tuple[type[GRPOTrainer], type[GRPOConfig]]] = {
    "trl": (MeasuredGRPOTrainer, GRPOConfig),
    "so_grpo": (SOGRPOTrainer, SOGRPOConfig),
    "so_ppo": (SOPPOTrainer, SOPPOConfig),
    "seeupo": (SeeUPOTrainer, SeeUPOConfig),
    "candidate": (CandidateTrainer, CandidateConfig),
}


def prepare(world: BenchmarkWorld, seed: int, folder: Path) -> Path:
    """The data and the policy of a seed, made once."""
    torch.set_num_threads(1)
    return world.prepare(seed, folder)


class Examiner(TrainerCallback):
    """Examines the policy, on tasks that it has never seen, after some of the rollouts."""

    def __init__(self, regime: Regime, examination: Examination) -> None:
        self._regime = regime
        self._examination = examination
        self.evaluations: list[dict[str, float]] = []
        self.stopped_at: int | None = None
        """The rollout after which training ended early."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._examine(model, 0)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        rollout, rest = divmod(state.global_step, self._regime.updates)
        if rest == 0 and (rollout % EVERY == 0 or rollout > self._regime.rollouts - LAST):
            self._examine(model, rollout)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step < state.max_steps:
            self.stopped_at = state.global_step // self._regime.updates
            self._examine(model, self.stopped_at)

    def _examine(self, model: Any, rollout: int) -> None:
        was_training = model.training
        model.eval()
        with torch.random.fork_rng():
            torch.manual_seed(rollout)
            scores = {"sampled_em": self._score(model, SAMPLED), "greedy_em": self._score(model, GREEDY)}
        model.train(was_training)
        self.evaluations.append({"rollout": rollout, **scores})

    def _score(self, model: Any, config: GenerationConfig) -> float:
        with torch.no_grad():
            return self._examination.score(model, config)


def build_trainer(job: Job, folder: Path, output: Path) -> GRPOTrainer:
    regime, method = regime_of(job), METHODS[job.method]
    trainer_class, config_class = TRAINERS[method.trainer]
    settings: dict[str, Any] = {
        "num_generations": GROUP,
        **(PPO_SETTINGS if method.family == "ppo" else {}),
        **method.settings,
    }
    if method.trainer != "trl":
        unset = {"target_kl": 0.0, "clip_range_scaling": "none", "rollout_staleness": regime.staleness}
        settings = {**unset, **settings}
    config = config_class(
        output_dir=str(output),
        seed=job.seed,
        learning_rate=job.learning_rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=regime.minibatch,
        steps_per_generation=regime.trajectories // regime.minibatch,
        num_iterations=regime.epochs,
        max_steps=regime.rollouts * regime.updates,
        max_completion_length=regime.world.max_completion_length,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="steps" if method.guard else "no",  # after every rollout, for a guard that goes back
        save_steps=regime.updates,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / POLICY)
    trainer = trainer_class(
        model=str(folder / POLICY),
        args=config,
        processing_class=tokenizer,
        callbacks=[Examiner(regime, regime.world.examination(folder, tokenizer))],
        **regime.world.trainer_arguments(folder) | ({"reward_funcs": REWARDS[method.reward]} if method.reward else {}),
    )
    if method.trainer == "trl":
        trainer.cycle.staleness = regime.staleness
    if method.guard:
        trainer.add_callback(CollapseGuard(method.guard, trainer))
    return trainer


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


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Train and evaluate. A run whose weights become NaN has an `error` and counts as collapsed."""
    torch.set_num_threads(1)
    regime = regime_of(job)
    world = prepare(regime.world, job.seed, folder)
    target = folder / job.name
    started = time.process_time()
    trainer = build_trainer(job, world, target)
    examiner = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Examiner))
    error = None
    try:
        trainer.train()
    except RuntimeError as failure:
        if "probability tensor" not in str(failure):  # what torch says of weights that are not numbers
            raise
        error = str(failure).splitlines()[0]
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    for checkpoint in target.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    target.mkdir(parents=True, exist_ok=True)
    (target / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
    record = {
        **asdict(job),
        "world": regime.world.name,
        "policy_parameters": trainer.model.num_parameters(),
        "settings": settings_of(job),
        "harness": HARNESS,
        "seconds": round(time.process_time() - started, 1),
        "evaluations": examiner.evaluations,
        "rollouts": summarize_rollouts(log, regime.updates),
        "error": error,
        **({} if examiner.stopped_at is None else {"stopped_at": examiner.stopped_at}),
    }
    partial = target / "record.part"
    partial.write_text(json.dumps(record))
    partial.replace(target / "record.json")
    return record
