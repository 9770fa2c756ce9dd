"""What a critic costs: SO-PPO with each kind of critic over SO-GRPO with the same policy.

    python -m benchmarks.critic_cost

Every trainer goes through whole cycles: it generates the turns of one batch, scores it under the old policy, and
trains on it. `head` and `model` are compared with full fine-tuning, `adapter` with LoRA of the same rank.

Time is the processor's, of one thread that does all the work, in cycles interleaved in one process: neither other
programs nor the machine's moods change the ratios. Memory is what the tensors hold at the peak (weights, gradients,
optimizer state, activations), counted by torch for a larger policy, whose weights are most of it as in earnest;
`between_steps_mib` is what of it does not depend on the number of tokens. Writes `benchmarks/results/critic_cost.json`
and `critic_cost.md`.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.live_bytes import LiveBytes
from sorl_trl import SOGRPOTrainer, SOPPOTrainer
from sorl_trl.command_line import Parser, at_least, run_command
from sorl_trl.rollout import EngineOptions, generate_turns
from sorl_trl.trainers.agents.policy_engine import policy_engine

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Variant:
    """One trainer: SO-PPO with `critic`, or SO-GRPO where that is None."""

    critic: str | None = None
    lora: bool = False


VARIANTS = {
    "so_grpo": Variant(),
    "so_grpo_lora": Variant(lora=True),
    "head": Variant("head"),
    "adapter": Variant("adapter", lora=True),
    "model": Variant("model"),
}
BASELINES = {"head": "so_grpo", "adapter": "so_grpo_lora", "model": "so_grpo"}


@dataclass(frozen=True)
class Sizes:
    """A policy, and the trajectories it is trained on: lengths in tokens."""

    hidden_size: int
    layers: int
    batch: int
    prompt: int = 32
    turns: int = 4
    turn: int = 32
    observation: int = 16
    updates: int = 2
    vocabulary: int = 4096
    lora_rank: int = 8

    @property
    def completion(self) -> int:
        return self.turns * self.turn + (self.turns - 1) * self.observation


TIMED = Sizes(hidden_size=256, layers=4, batch=8)
WEIGHED = Sizes(hidden_size=768, layers=8, batch=2, turn=16, observation=8)


class FixedRollout:
    """A `rollout_func` whose trajectories all have the same lengths: only what is sampled differs."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.seconds = 0.0

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        started = time.process_time()
        sizes = self.sizes
        prompt_ids, *_ = trainer._tokenize_prompts(prompts)
        completions: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        with policy_engine(trainer, (), EngineOptions()) as (engine, _), closing(engine):
            engine.open(len(prompts))
            for turn in range(sizes.turns):
                contexts = [[*p, *c] for p, c in zip(prompt_ids, completions, strict=True)]
                for row, generation in enumerate(generate_turns(engine, contexts, [sizes.turn] * len(contexts))):
                    completions[row] += generation.token_ids
                    logprobs[row] += generation.logprobs or ()
                    if turn < sizes.turns - 1:
                        completions[row] += range(3, 3 + sizes.observation)
                        logprobs[row] += [0.0] * sizes.observation
        unit = sizes.turn + sizes.observation
        turn_ids = [t // unit if t % unit < sizes.turn else -1 for t in range(sizes.completion)]
        self.seconds += time.process_time() - started
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completions,
            "logprobs": logprobs if trainer.use_vllm else None,
            "turn_ids": [turn_ids] * len(completions),
        }


def even_share(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A reward that costs nothing and differs between trajectories."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def save_policy(sizes: Sizes, folder: Path) -> None:
    """A random Llama, as `model_name_or_path` for policy and critic."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden_size,
        intermediate_size=3 * sizes.hidden_size,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.hidden_size // 64,
        pad_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def build_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({str(i): i for i in range(vocabulary)}, unk_token="2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", padding_side="left")


class Cycles:
    """One variant's trainer, cycle by cycle: one rollout, then `updates` optimizer steps on it."""

    def __init__(self, variant: Variant, sizes: Sizes, policy: Path, **options: Any) -> None:
        self.rollout = FixedRollout(sizes)
        self.trainer = build_trainer(variant, sizes, policy, self.rollout, **options)
        self.updates = sizes.updates
        self.trainer.create_optimizer()
        # What `train` does before the first step.
        self.trainer.model.gradient_checkpointing_enable(self.trainer.args.gradient_checkpointing_kwargs)
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer.accelerator.gradient_state._set_sync_gradients(True)
        self.rows = [self.trainer.train_dataset[0]] * sizes.batch

    def run(self) -> float:
        """Seconds of one cycle."""
        started = time.process_time()
        trainer = self.trainer
        for _ in range(self.updates):
            trainer.model.train()
            trainer.training_step(trainer.model, self.rows, None)
            torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
        return time.process_time() - started


def build_trainer(variant: Variant, sizes: Sizes, policy: Path, rollout: FixedRollout, **options: Any) -> Any:
    trainer_class: Any = SOPPOTrainer if variant.critic else SOGRPOTrainer
    fields: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": sizes.batch,
        "num_generations": sizes.batch,
        "num_iterations": sizes.updates,
        "max_completion_length": sizes.completion,
        "generation_kwargs": {"suppress_tokens": [1]},
        "report_to": "none",
        **({"critic": variant.critic} if variant.critic else {}),
    }
    config = trainer_class.config_class(str(policy.parent / "out"), **{**fields, **options})
    lora = LoraConfig(r=sizes.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return trainer_class(
        str(policy),
        even_share,
        config,
        Dataset.from_list([{"prompt": " ".join(["7"] * sizes.prompt)}]),
        processing_class=build_tokenizer(sizes.vocabulary),
        peft_config=lora if variant.lora else None,
        rollout_func=rollout,
    )


def interleaved_seconds(rounds: int, sizes: Sizes = TIMED) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each cycle of each variant, and the share of generation in them."""
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy"
        save_policy(sizes, policy)
        cycles = {name: Cycles(variant, sizes, policy) for name, variant in VARIANTS.items()}
        for each in cycles.values():
            each.run()
            each.rollout.seconds = 0.0
        for round_ in range(rounds):
            for name in list(VARIANTS)[:: 1 if round_ % 2 == 0 else -1]:
                seconds[name].append(cycles[name].run())
    generation = {name: each.rollout.seconds / sum(seconds[name]) for name, each in cycles.items()}
    return seconds, generation


def memory_mib(variant: Variant) -> dict[str, float]:
    """At the peak of one cycle (its first update makes the optimizer's state, its last has it all), and after it."""
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy"
        save_policy(WEIGHED, policy)
        cycle = Cycles(variant, WEIGHED, policy)
        model = cycle.trainer.model
        with LiveBytes([*model.parameters(), *model.buffers()]) as live:
            cycle.run()
            cycle.trainer._buffered_inputs = None
            gc.collect()
        return {"peak_mib": live.peak / 2**20, "between_steps_mib": live.now / 2**20}


def ratios(kind: str, seconds: dict[str, list[float]]) -> list[float]:
    """Quartiles of the kind's time over its baseline's, cycle by cycle."""
    pairs = zip(seconds[kind], seconds[BASELINES[kind]], strict=True)
    return statistics.quantiles([a / b for a, b in pairs], n=4)


def report(
    seconds: dict[str, list[float]],
    generation: dict[str, float],
    memory: dict[str, dict[str, float]],
    once: dict[str, list[float]],
) -> dict[str, Any]:
    """Per kind of critic, ratios to its baseline, those of time cycle by cycle; absolute values of all variants."""
    kinds = {}
    for kind, baseline in BASELINES.items():
        lower, median, upper = ratios(kind, seconds)
        kinds[kind] = {
            "baseline": baseline,
            "time_ratio": median,
            "time_ratio_q25": lower,
            "time_ratio_q75": upper,
            "one_update_time_ratio": ratios(kind, once)[1],
            "training_time_ratio": training_seconds(kind, seconds, generation)
            / training_seconds(baseline, seconds, generation),
            "memory_ratio": memory[kind]["peak_mib"] / memory[baseline]["peak_mib"],
        }
    absolute = {
        name: {"cycle_seconds": statistics.median(seconds[name]), "generation_share": generation[name], **memory[name]}
        for name in VARIANTS
    }
    settings = {"timed": asdict(TIMED), "weighed": asdict(WEIGHED), "gradient_checkpointing": True}
    return {**kinds, "absolute": absolute, "settings": {**settings, "cycles": len(seconds["head"]), "threads": 1}}


def training_seconds(name: str, seconds: dict[str, list[float]], generation: dict[str, float]) -> float:
    """Of all cycles, without generation."""
    return sum(seconds[name]) * (1 - generation[name])


def table(result: dict[str, Any]) -> str:
    lines = [
        "# What a critic costs",
        "",
        f"SO-PPO over SO-GRPO with the same policy: medians (quartiles) over {result['settings']['cycles']} "
        f"interleaved cycles of one rollout and {TIMED.updates} updates; one thread, gradient checkpointing.",
        "",
        "| critic | over | time | without generation | generation in that of the baseline | one update | memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, baseline in BASELINES.items():
        row = result[kind]
        over = "SO-GRPO, LoRA" if VARIANTS[baseline].lora else "SO-GRPO"
        share = result["absolute"][baseline]["generation_share"]
        lines.append(
            f"| `{kind}` | {over} "
            f"| {row['time_ratio']:.2f} ({row['time_ratio_q25']:.2f} to {row['time_ratio_q75']:.2f}) "
            f"| {row['training_time_ratio']:.2f} | {share:.0%} | {row['one_update_time_ratio']:.2f} "
            f"| {row['memory_ratio']:.2f} |"
        )
    lines += [
        "",
        "The column before the last is the time with one update per rollout: TRL then does not score it under the old "
        "policy, and SO-PPO makes a forward pass of its own for the old values.",
    ]
    return "\n".join(lines) + "\n"


def main(words: Sequence[str]) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cycles", type=at_least(2), default=8, help="interleaved cycles of each trainer, at least 2")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    memory = {name: memory_mib(variant) for name, variant in VARIANTS.items()}
    once, _ = interleaved_seconds(arguments.cycles, replace(TIMED, updates=1))
    result = report(*interleaved_seconds(arguments.cycles), memory, once)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "critic_cost.json").write_text(json.dumps(result, indent=2) + "\n")
    (RESULTS / "critic_cost.md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    sys.exit(run_command(main))
