"""What training a pretrained language model on a CPU costs, over what the model alone costs for the same tokens.

    python -m benchmarks.real_model_cost --model DIR

Each case trains as `recipes/smollm2_search.yaml` says, with a learning rate of 0, in a process of its own: a rollout
of 16 trajectories and two updates of 8 each. Between them the same process does with the model alone what the same
tokens take: a step of AdamW on the cross-entropy of the completions, a forward pass, and a loop that reads each row's
context and decodes as many tokens as were sampled. Time is the processor's, of one thread; ratios are medians over
interleaved pairs. Memory is the most that a process of its own had resident, the model alone in another one.

DIR is a policy that knows the protocol, such as `runs/train-lm/warm-start`. Writes
`benchmarks/results/real_model_cost.json` and `.md`; with names of cases, only their rows anew.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from sorl_trl.command_line import Parser, at_least, run_command
from sorl_trl.recipe.arguments import parse_arguments
from sorl_trl.recipe.build import build_trainer
from sorl_trl.sandbox import CORPUS_FILE, TRAIN_FILE, build_atlas

RESULTS = Path(__file__).parent / "results" / "real_model_cost"
FASTER = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
"""Memory that is freed is kept for the next step."""
EXACT = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""Memory that is freed goes back at once, so that the peak is of what was needed."""
FIELDS = ("prompt_mask", "completion_mask", "completion_ids", "turn_ids", "old_per_token_logps")
_LORA = ["--use_peft", "true", "--lora_r", "16", "--lora_target_modules", "all-linear"]
_BF16 = ["--bf16", "true"]
_PPO = ["--trainer", "so_ppo", "--critic"]
CASES: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "so_grpo": ("SO-GRPO", [], FASTER),
    "plain_malloc": ("SO-GRPO, malloc as it is", [], {}),
    "bf16": ("SO-GRPO, bfloat16", _BF16, FASTER),
    "lora": ("SO-GRPO, LoRA", _LORA, FASTER),
    "lora_bf16": ("SO-GRPO, LoRA, bfloat16", [*_LORA, *_BF16], FASTER),
    "grpo": ("GRPO", ["--method", "grpo"], FASTER),
    "head": ("SO-PPO, `head`", [*_PPO, "head"], FASTER),
    "adapter": ("SO-PPO, `adapter`, LoRA", [*_PPO, "adapter", *_LORA], FASTER),
    "model": ("SO-PPO, `model`", [*_PPO, "model"], FASTER),
}
"""Name to title, options beside the recipe's, and environment."""


def trainer_of(case: str, model: str, folder: Path) -> Any:
    """Ready for `training_step`, as `train` makes it."""
    world = build_atlas(0, plain=True).write(folder / "world")
    paths = {"model_name_or_path": model, "train_questions": world / TRAIN_FILE, "corpus": world / CORPUS_FILE}
    paths |= {"output_dir": folder / "out", "steps_per_generation": 2, "learning_rate": 0, "eval_questions": ""}
    given = [word for name, value in paths.items() for word in (f"--{name}", str(value))]
    options = ["--collapse_guard", "off", "--disable_tqdm", "true", *CASES[case][1]]
    trainer: Any = build_trainer(parse_arguments(["--config", "smollm2_search", *given, *options]))
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    return trainer


class Clock:
    """CPU-seconds of what is called, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def __call__(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.process_time()
            result = function(*args, **kwargs)
            self.seconds.setdefault(name, []).append(time.process_time() - started)
            return result

        return timed


def descend(trainer: Any) -> None:
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def rollout_of(trainer: Any, rows: list[Any]) -> list[dict[str, Tensor]]:
    """Its two micro-batches, with old log-probabilities."""
    trainer._step = 0
    type(trainer)._prepare_inputs(trainer, rows)
    return list(trainer._buffered_inputs)


def our_step(trainer: Any, batch: dict[str, Tensor]) -> None:
    trainer._prepare_inputs = lambda _: batch
    trainer.training_step(trainer.model, None, None)
    descend(trainer)


def bare_step(trainer: Any, batch: dict[str, Tensor]) -> None:
    with trainer.accelerator.autocast():
        loss = cross_entropy(*bare_logits(trainer, batch))
    loss.backward()
    descend(trainer)


def bare_score(trainer: Any, batch: dict[str, Tensor], autocast: bool = True) -> Tensor:
    """(B, T) log-probabilities of the completions' tokens."""
    with torch.no_grad(), trainer.accelerator.autocast() if autocast else nullcontext():
        return -cross_entropy(*bare_logits(trainer, batch), reduction="none").view(batch["completion_ids"].shape)


def bare_logits(trainer: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of the completions' tokens, and the tokens."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    targets = batch["completion_ids"]
    output = trainer.model(ids, attention_mask=mask, use_cache=False, logits_to_keep=targets.shape[1] + 1)
    return output.logits[:, :-1].flatten(0, 1), targets.flatten()


@torch.no_grad()
def bare_rollout(trainer: Any, contexts: list[int], sampled: list[int]) -> None:
    """Read and sample so many tokens in each row, which leaves the batch then. Contexts have their mean length."""
    trainer.model.eval()
    cache = DynamicCache()
    ids = torch.randint(3, 1000, (len(sampled), round(statistics.mean(contexts))))
    lengths = sorted(sampled, reverse=True)
    for step in range(lengths[0]):
        alive = sum(length > step for length in lengths)
        if alive < len(ids):
            ids = ids[:alive]
            cache.batch_select_indices(torch.arange(alive))
        output = trainer.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        ids = torch.multinomial(torch.softmax(output.logits[:, -1].float(), -1), 1)
    trainer.model.train()


def seconds(case: str, model: str, rounds: int) -> dict[str, Any]:
    """CPU-seconds, ours and the model's alone, and what ratios were before anything had changed."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(case, model, Path(folder))
        trainer.model.train()
        trainer.rollout_func = clock("rollout", trainer.rollout_func)
        score = trainer._get_per_token_logps_and_entropies
        timed = clock("scoring", score)
        trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (
            score if torch.is_grad_enabled() else timed
        )(*args, **kwargs)
        difference: list[Tensor] = []
        for round_ in range(rounds):
            rows = [trainer.train_dataset[2 * round_ + row // 8] for row in range(16)]
            batches = rollout_of(trainer, rows)
            for batch in batches:
                clock("step", our_step)(trainer, batch)
                clock("bare_step", bare_step)(trainer, batch)
            for batch in batches:
                clock("bare_scoring", bare_score)(trainer, batch)
            whole: dict[str, Tensor] = {name: torch.cat([batch[name] for batch in batches]) for name in FIELDS}
            kept = (whole["turn_ids"] >= 0) & whole["completion_mask"].bool()
            read = whole["prompt_mask"].sum(1) + whole["completion_mask"].sum(1) - kept.sum(1)
            clock("bare_rollout", bare_rollout)(trainer, read.tolist(), kept.sum(1).tolist())
            sizes = {"read": int(read.sum()), "sampled": int(kept.sum()), "padded": whole["completion_ids"].numel()}
            # What the rollout's engine, which runs without autocast, sampled from.
            sampling = torch.cat([bare_score(trainer, batch, autocast=False) for batch in batches])
            difference.append((whole["old_per_token_logps"] - sampling)[kept].abs())
        of_step = ("turns/ratio_min", "turns/ratio_max", "clip_fraction/token", "kl_to_old")
        logged = {name: trainer._metrics["train"][name] for name in of_step}
    apart = torch.cat(difference)
    found = {"mean": float(apart.mean()), "max": float(apart.max()), "above_0.2": float((apart > 0.2).float().mean())}
    return {"seconds": clock.seconds, **sizes, "before_any_change": logged, "old_logps_off_sampling": found}


def peak(case: str, model: str, bare: bool) -> int:
    """Bytes resident at the peak of a rollout and its updates, which are ours, or those of the model alone."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(case, model, Path(folder))
        trainer.model.train()
        rows = [trainer.train_dataset[row // 8] for row in range(16)]
        for batch in rollout_of(trainer, rows):
            (bare_step if bare else our_step)(trainer, batch)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def alone(environment: dict[str, str], function: Callable[..., Any], *args: Any) -> Any:
    """The result, from a process that starts with this environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    os.environ.clear()
    os.environ.update(kept | environment)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def median_ratio(ours: Sequence[float], bare: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, bare, strict=True))


def table(rows: dict[str, Any]) -> str:
    lines = [
        "# What training a pretrained model on a CPU costs",
        "",
        "Processor seconds of one thread: a rollout of 16 trajectories, the scoring of them under the old policy, and "
        "an update on 8. After each its ratio to what the model alone takes for the same tokens, with the same "
        "adapters and precision; memory is the peak of a process.",
        "",
        "| case | rollout | ratio | scoring | ratio | update | ratio | GiB | ratio | a rollout with its updates |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, row in rows.items():
        spent, memory, whole = row["seconds"], row["peak_bytes"], 0.0
        cells = []
        for name, times in (("rollout", 1), ("scoring", 1), ("step", 2)):
            ours, bare = spent[name], spent[f"bare_{name}"]
            if name == "scoring":
                bare = [a + b for a, b in zip(bare[::2], bare[1::2], strict=True)]
            whole += times * statistics.median(ours)
            cells += [f"{statistics.median(ours):.1f}", f"{median_ratio(ours, bare):.2f}"]
        cells += [f"{memory['ours'] / 2**30:.2f}", f"{memory['ours'] / memory['bare']:.2f}", f"{whole:.1f}"]
        lines.append(f"| {CASES[case][0]} | {' | '.join(cells)} |")
    lines += ["", "| case | old log-probability off the sampled one, mean | largest | off by more than 0.2 |"]
    lines += ["|---|---|---|---|"]
    for case, row in rows.items():
        off = row["old_logps_off_sampling"]
        lines.append(f"| {CASES[case][0]} | {off['mean']:.1e} | {off['max']:.1e} | {off['above_0.2']:.1%} |")
    return "\n".join(lines) + "\n"


def main(words: Sequence[str]) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="case", help=f"some of: {', '.join(CASES)}; all, if none is named")
    parser.add_argument("--model", required=True, help="folder of the policy")
    parser.add_argument("--rounds", type=at_least(1), default=3, help="rollouts of each case")
    arguments = parser.parse_args(words)
    file = RESULTS.with_suffix(".json")
    for case in arguments.cases or CASES:
        row = alone(CASES[case][2], seconds, case, arguments.model, arguments.rounds)
        memory = {who: alone(EXACT, peak, case, arguments.model, who == "bare") for who in ("ours", "bare")}
        rows = json.loads(file.read_text()) if file.is_file() else {}
        rows[case] = {**row, "peak_bytes": memory}
        rows = {name: rows[name] for name in CASES if name in rows}
        file.write_text(json.dumps(rows) + "\n")
        RESULTS.with_suffix(".md").write_text(table(rows))
        print(table({case: rows[case]}).splitlines()[6], flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main))
