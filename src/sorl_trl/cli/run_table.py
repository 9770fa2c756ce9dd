"""What a run is, in one table: `sorl train` prints it before the progress bar, and the dry run first of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sorl_trl.methods.method import piece_name
from sorl_trl.recipe import Arguments
from sorl_trl.trainers.base import TurnLevelTrainer


def show(rows: Iterable[tuple[str, str]], trainer: TurnLevelTrainer) -> None:
    """Print rows, once on all machines."""
    for name, text in rows:
        trainer.accelerator.print(f"{name:10} {text}", flush=True)


def run_table(arguments: Arguments, trainer: TurnLevelTrainer) -> Iterator[tuple[str, str]]:
    """Its rows: name and text."""
    config = arguments.config
    trained = "LoRA" if arguments.model.use_peft else "all weights"
    yield "trainer", f"{arguments.trainer.trainer}, {trained} of {arguments.model.model_name_or_path}"
    pieces = trainer.method.pieces()
    for number, name in enumerate(("credit", "keep", "weight", "surrogate", "terms")):
        of_name = ", ".join(piece_name(piece) for field, piece in pieces if field == name)
        yield "" if number else "method", f"{name}: {of_name or '-'}"
    yield (
        "loss",
        f"{config.loss_type}, {config.importance_sampling_level} ratios, epsilon {config.epsilon:g}, target_kl "
        f"{config.target_kl:g}",
    )
    yield "rollout", _batches(trainer)
    tags = config.turn_boundary_tags
    yield "turns", "one per generation" + (f", split after {' '.join(tags)}" if tags else "") + ", as recorded"
    yield "engine", _engine(arguments)
    yield "saved", _saved(trainer)


def _batches(trainer: TurnLevelTrainer) -> str:
    config, processes = trainer.args, trainer.accelerator.num_processes
    size = config.generation_batch_size
    return (
        f"{size} trajectories = {size // config.num_generations} questions x {config.num_generations}, for "
        f"{config.updates_per_rollout:g} updates, on {processes} process{'es' * (processes > 1)}"
    )


def _engine(arguments: Arguments) -> str:
    config = arguments.config
    if not config.use_vllm:
        return f"transformers, {arguments.engine.rollout_engine}"
    if config.vllm_mode == "server":
        return "vLLM, a server"
    asleep = ", asleep while training" if config.vllm_enable_sleep_mode else ""
    return f"vLLM, colocated, {config.vllm_gpu_memory_utilization:g} of each GPU{asleep}"


def _saved(trainer: TurnLevelTrainer) -> str:
    config = trainer.args
    steps = {
        "no": "no checkpoints",
        "epoch": "a checkpoint each epoch",
        "steps": f"a checkpoint each {config.save_steps:g} steps",
    }
    kept = f" (the last {config.save_total_limit})" * bool(config.save_total_limit)
    every = config.save_trajectories_steps
    trajectories = f"trajectories each {every} steps" if every else "no trajectories"
    trackers = ", ".join(config.report_to) or "none"
    saved = steps.get(str(getattr(config.save_strategy, "value", config.save_strategy)), "the best checkpoint")
    return f"the policy at the end, {saved}{kept}, {trajectories}; trackers: {trackers}"
