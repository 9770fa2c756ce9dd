"""What training a pretrained language model on a CPU costs, over what the model alone costs for the same tokens.

    python -m benchmarks.real_model_cost --model DIR

Each case trains with `recipes/smollm2_search.yaml`, but a learning rate of 0, in a process of its own: a rollout
of 16 trajectories and two updates of 8 each. Between them the same process does with the model alone what the same
tokens take: a step of AdamW on the cross-entropy of the completions, a forward pass, and a loop that reads each row's
context and decodes as many tokens as were sampled. Time is the processor's, of one thread; ratios are medians over
interleaved pairs. Memory is the most that a process of its own had resident, the model alone in another one.

DIR is a policy that knows the protocol, such as `runs/train-lm/warm-start`. Writes `real_model_cost.json` and `.md` in
`benchmarks/results`; of cases that are named, only their rows anew.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from examples.quickstart import CORPUS_FILE, TRAIN_FILE, build_atlas
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from benchmarks.common import RESULTS, alone, descend, ready, table
from sorl_trl.cli.arguments import parse_arguments
from sorl_trl.cli.build import build_trainer
from sorl_trl.command_line import Parser, at_least, run_command

FILE = RESULTS / "real_model_cost.json"
FASTER = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}  # what is freed is kept
EXACT = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}  # it goes back at once, so that the peak is of what was needed
FIELDS = ("prompt_mask", "completion_mask", "turn_ids")
_LORA = ["--use_peft", "true", "--lora_r", "16", "--lora_target_modules", "all-linear"]
_BF16 = ["--bf16", "true"]
_PPO = ["--trainer", "so_ppo", "--critic"]
CASES: dict[str, tuple[str, list[str]]] = {
    "so_grpo": ("SO-GRPO", []),
    "bf16": ("SO-GRPO, bfloat16", _BF16),
    "lora": ("SO-GRPO, LoRA", _LORA),
    "lora_bf16": ("SO-GRPO, LoRA, bfloat16", [*_LORA, *_BF16]),
    "grpo": ("GRPO", ["--method", "grpo"]),
    "head": ("SO-PPO, `head`", [*_PPO, "head"]),
    "adapter": ("SO-PPO, `adapter`, LoRA", [*_PPO, "adapter", *_LORA]),
    "model": ("SO-PPO, `model`", [*_PPO, "model"]),
}
"""Name to title, and options beside the recipe's."""


def trainer_of(case: str, model: str, folder: Path) -> Any:
    """Ready for `training_step`, as `train` makes it."""
    world = build_atlas(0, plain=True).write(folder / "world")
    paths = {"model_name_or_path": model, "train_questions": world / TRAIN_FILE, "corpus": world / CORPUS_FILE}
    paths |= {"output_dir": folder / "out", "steps_per_generation": 2, "learning_rate": 0, "eval_questions": ""}
    given = [word for name, value in paths.items() for word in (f"--{name}", str(value))]
    options = ["--collapse_guard", "off", "--disable_tqdm", "true", *CASES[case][1]]
    trainer = ready(build_trainer(parse_arguments(["--config", "smollm2_search", *given, *options])))
    trainer.model.train()
    return trainer


def timed(seconds: dict[str, list[float]], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose CPU-seconds are added to a list."""

    def run(*args: Any, **kwargs: Any) -> Any:
        started = time.process_time()
        result = function(*args, **kwargs)
        seconds.setdefault(name, []).append(time.process_time() - started)
        return result

    return run


def collect_rollout(trainer: Any, first: int) -> list[dict[str, Tensor]]:
    """Of two prompts, from the first one on: its two micro-batches, with old log-probabilities."""
    trainer._step = 0
    type(trainer)._prepare_inputs(trainer, [trainer.train_dataset[first + row // 8] for row in range(16)])
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


def bare_score(trainer: Any, batch: dict[str, Tensor]) -> Tensor:
    """Log-probabilities of the completions' tokens."""
    with torch.no_grad(), trainer.accelerator.autocast():
        return -cross_entropy(*bare_logits(trainer, batch), reduction="none")


def bare_logits(trainer: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of the completions' tokens, and the tokens."""
    ids, mask = (torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], 1) for name in ("ids", "mask"))
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
    """CPU-seconds, ours and the model's alone."""
    spent = dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(case, model, Path(folder))
        trainer.rollout_func = timed(spent, "rollout", trainer.rollout_func)
        by_grad = {True: (score := trainer._forward), False: timed(spent, "scoring", score)}
        trainer._forward = lambda *a, **k: by_grad[torch.is_grad_enabled()](*a, **k)
        for round_ in range(rounds):
            batches = collect_rollout(trainer, 2 * round_)
            for batch in batches:
                timed(spent, "step", our_step)(trainer, batch)
                timed(spent, "bare_step", bare_step)(trainer, batch)
                timed(spent, "bare_scoring", bare_score)(trainer, batch)
            whole: dict[str, Tensor] = {name: torch.cat([batch[name] for batch in batches]) for name in FIELDS}
            kept = (whole["turn_ids"] >= 0) & whole["completion_mask"].bool()
            read = whole["prompt_mask"].sum(1) + whole["completion_mask"].sum(1) - kept.sum(1)
            timed(spent, "bare_rollout", bare_rollout)(trainer, read.tolist(), kept.sum(1).tolist())
    return {"seconds": spent}


def peak(case: str, model: str, bare: bool) -> int:
    """Bytes resident at the peak of a rollout and its updates, which are ours, or those of the model alone."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(case, model, Path(folder))
        for batch in collect_rollout(trainer, 0):
            (bare_step if bare else our_step)(trainer, batch)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


HEADER = """# What training a pretrained model on a CPU costs

Processor seconds of one thread: a rollout of 16 trajectories, the scoring of them under the old policy, and an update
on 8. After each its ratio to what the model alone takes for the same tokens, with the same adapters and precision;
memory is the peak of a process. The model alone reads the prompt of each trajectory, ours that of a group once; a
critic's share is in the ratios."""
COLUMNS = (
    *("case", "rollouts", "rollout", "ratio", "scoring", "ratio", "update", "ratio", "GiB", "ratio"),
    "one and updates",
)


def cells(case: str, row: dict[str, Any]) -> list[str]:
    spent, memory, whole = row["seconds"], row["peak_bytes"], 0.0
    found = [CASES[case][0], str(len(spent["rollout"]))]
    for name, times in (("rollout", 1), ("scoring", 1), ("step", 2)):
        ours, bare = spent[name], spent[f"bare_{name}"]
        if name == "scoring":
            bare = [a + b for a, b in zip(bare[::2], bare[1::2], strict=True)]
        whole += times * statistics.median(ours)
        over = [a / b for a, b in zip(ours, bare, strict=True)]
        found += [f"{statistics.median(ours):.1f}", f"{statistics.median(over):.2f}"]
    return [*found, f"{memory['ours'] / 2**30:.2f}", f"{memory['ours'] / memory['bare']:.2f}", f"{whole:.1f}"]


def main(words: Sequence[str]) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="case", help=f"some of: {', '.join(CASES)}; all, if none is named")
    parser.add_argument("--model", required=True, help="folder of the policy")
    parser.add_argument("--rounds", type=at_least(1), default=3, help="rollouts of each case")
    arguments = parser.parse_args(words)
    for case in arguments.cases or CASES:
        row = alone(FASTER, seconds, case, arguments.model, arguments.rounds)
        row["peak_bytes"] = {who: alone(EXACT, peak, case, arguments.model, who == "bare") for who in ("ours", "bare")}
        rows = {**(json.loads(FILE.read_text()) if FILE.is_file() else {}), case: row}
        rows = {name: rows[name] for name in CASES if name in rows}
        FILE.write_text(json.dumps(rows) + "\n")
        lines = [cells(*each) for each in rows.items()]
        FILE.with_suffix(".md").write_text(f"{HEADER}\n\n{table(COLUMNS, lines)}")
        print(*cells(case, row), flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main))
