"""What a run is, in one table: `sorl train` prints it before the progress bar, and the dry run first of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from transformers.trainer_utils import SaveStrategy

from sorl_trl.recipe.arguments import Arguments
from sorl_trl.trainers.base import TurnLevelTrainer


def show(rows: Iterable[tuple[str, str]], trainer: TurnLevelTrainer) -> None:
    """Print rows, once on all machines."""
    for name, text in rows:
        trainer.accelerator.print(f"{name:10} {text}", flush=True)


def run_table(arguments: Arguments, trainer: TurnLevelTrainer) -> Iterator[tuple[str, str]]:
    """Its rows: name and text."""
    config, processes = trainer.args, trainer.accelerator.num_processes
    trained = "LoRA" if arguments.model.use_peft else "all weights"
    yield "trainer", f"{arguments.trainer.trainer}, {trained} of {arguments.model.model_name_or_path}"
    yield "method", trainer.method.describe()
    level, epsilon, target = config.importance_sampling_level, config.epsilon, config.target_kl
    yield "loss", f"{config.loss_type}, {level} ratios, epsilon {epsilon:g}, target_kl {target:g}"
    size, group = config.generation_batch_size, config.num_generations
    rollout = f"{size} trajectories = {size // group} questions x {group}, for {config.updates_per_rollout:g} updates"
    yield "rollout", f"{rollout}, on {processes} process{'es' * (processes > 1)}"
    own = f"transformers, {arguments.engine.rollout_engine}"
    yield "engine", f"vLLM, {config.vllm_mode}" if config.use_vllm else own
    yield "saved", _saved(trainer)


def _saved(trainer: TurnLevelTrainer) -> str:
    config, every = trainer.args, trainer.args.save_trajectories_steps
    strategy = SaveStrategy(config.save_strategy).value
    checkpoints = f"each {config.save_steps:g} steps" if strategy == "steps" else strategy
    trajectories = f"each {every} steps" if every else "no"
    trackers = ", ".join(config.report_to) or "no"
    return f"the policy; checkpoints: {checkpoints}; trajectories: {trajectories}; trackers: {trackers}"
