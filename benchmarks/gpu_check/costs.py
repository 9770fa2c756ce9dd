"""What our loss costs over TRL's, and what each critic costs over none: by the device's timers, with peak memory."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import critic_cost, critic_cycles, overhead
from benchmarks.gpu_check.meters import MEMORY, TIMERS, Stopwatch, peak_mib
from benchmarks.gpu_check.records import Context

LOSS = overhead.Sizes(hidden_size=1024, layers=8, vocabulary=32768, turn=128)
SMALL_LOSS = overhead.Sizes(hidden_size=64, layers=1, batch=2, prompt=4, turns=2, turn=4, observation=2, vocabulary=64)
CRITIC = critic_cycles.Sizes(hidden_size=1024, layers=8, batch=16, vocabulary=32768)
SMALL_CRITIC = critic_cycles.Sizes(
    hidden_size=64, layers=1, batch=2, prompt=4, turns=2, turn=4, observation=2, vocabulary=64, lora_rank=2
)
ROUNDS = {"overhead": 20, "critic_cost": 3, "small": 2}


def overhead_of_the_loss(context: Context) -> dict[str, Any]:
    """An optimizer step of SO-GRPO over one of `trl.GRPOTrainer`, steps interleaved."""
    sizes = SMALL_LOSS if context.small else LOSS
    folder = str(context.folder / "out")

    def build(variant: str) -> Any:
        return overhead.build(variant, folder, sizes, **context.precision)

    memory = {variant: _peak(context, build(variant), overhead.step) for variant in overhead.VARIANTS}
    trainers = {variant: build(variant) for variant in overhead.VARIANTS}
    seconds: dict[str, list[float]] = {variant: [] for variant in trainers}
    for number in range(1 + (ROUNDS["small"] if context.small else ROUNDS["overhead"])):
        for variant in list(trainers)[:: 1 if number % 2 == 0 else -1]:
            with Stopwatch(context.device) as watch:
                overhead.step(trainers[variant])
            if number:  # the first step of each makes its optimizer's state
                seconds[variant].append(watch.seconds)
    rows = {
        variant: {
            "time_ratio": overhead.spread([a / b for a, b in zip(own, seconds["GRPO"], strict=True)]),
            "seconds": statistics.median(own),
            "memory_ratio": memory[variant] / memory["GRPO"],
            "peak_mib": memory[variant],
        }
        for variant, own in seconds.items()
    }
    return {**rows, **_means(context)}


def cost_of_each_critic(context: Context) -> dict[str, Any]:
    """A cycle of SO-PPO (one rollout, two updates) over one of SO-GRPO, cycles interleaved."""
    sizes = SMALL_CRITIC if context.small else CRITIC
    policy = context.folder / "policy"
    critic_cycles.save_policy(sizes, policy)

    def build(name: str) -> critic_cycles.Cycles:
        return critic_cycles.Cycles(critic_cost.VARIANTS[name], sizes, policy, **context.precision)

    memory = {}
    for name in critic_cost.VARIANTS:
        cycles = build(name)
        memory[name] = _peak(context, cycles.trainer, lambda _, cycles=cycles: cycles.run())
        del cycles
    all_cycles = {name: build(name) for name in critic_cost.VARIANTS}
    seconds: dict[str, list[float]] = {name: [] for name in all_cycles}
    for number in range(1 + (ROUNDS["small"] if context.small else ROUNDS["critic_cost"])):
        for name in list(all_cycles)[:: 1 if number % 2 == 0 else -1]:
            with Stopwatch(context.device) as watch:
                all_cycles[name].run()
            if number:
                seconds[name].append(watch.seconds)
    rows: dict[str, Any] = {}
    for kind, baseline in critic_cost.BASELINES.items():
        lower, median, upper = critic_cost.ratios(kind, seconds)
        rows[kind] = {"over": baseline, "time_ratio": {"median": median, "q25": lower, "q75": upper}}
        rows[kind]["memory_ratio"] = memory[kind] / memory[baseline]
    absolute = {
        name: {"cycle_seconds": statistics.median(own), "peak_mib": memory[name]} for name, own in seconds.items()
    }
    return {**rows, "absolute": absolute, **_means(context)}


def _peak(context: Context, trainer: Any, step: Any) -> float:
    model = trainer.model
    return peak_mib(context.device, lambda: step(trainer), lambda: [*model.parameters(), *model.buffers()])


def _means(context: Context) -> dict[str, str]:
    return {"timer": TIMERS[context.device], "memory": MEMORY[context.device]}
