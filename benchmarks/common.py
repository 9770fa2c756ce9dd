"""What benchmarks share: rows to which several commands add side by side, tables, and a random Llama whose tokens are
numbers."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sorl_trl.command_line import UserMistake
from sorl_trl.files import write_whole

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
SORL = (sys.executable, "-c", "import sys; from sorl_trl.cli.main import main; sys.exit(main())")
"""The command `sorl`, of this tree."""
ALLOCATION = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
"""Environment of a process on a CPU that keeps the memory of a language model's logits, instead of mapping it anew."""
QUIET: Row = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
"""Fields of a trainer's config: float32 on the CPU, and nothing is reported or saved."""

MIXED = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
"""TRL's default precision. On a CPU with instructions for it, a language model takes half of the time of float32. The
cache would keep the first weights as long as the context lasts."""


def table(names: Sequence[str], rows: Iterable[Sequence[str]], left: int | None = None) -> str:
    """Markdown; the columns after the first `left` ones are to the right, if that is given."""
    columns = ["---" if left is None or i < left else "---:" for i in range(len(names))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (names, columns, *rows))


def alone(environment: Mapping[str, str], function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process of its own, that starts with this environment."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(function, *arguments).result()
    finally:
        os.environ.clear()
        os.environ.update(before)


def sorl(folder: Path, *words: Any) -> float:
    """Run a command of `sorl`, whose output goes into the folder's log; the CPU-seconds that it took."""
    before = os.times()
    added = {} if torch.cuda.is_available() else {**ALLOCATION, "DS_ACCELERATOR": "cpu"}
    with (folder / "log.txt").open("a") as log:
        done = subprocess.run([*SORL, *map(str, words)], stdout=log, stderr=log, env={**os.environ, **added})
    if done.returncode:
        raise RuntimeError(f"sorl {words[0]} failed with code {done.returncode}: see {folder / 'log.txt'}")
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def ready(trainer: Any) -> Any:
    """The trainer, for `training_step` without `train`."""
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    return trainer


def descend(trainer: Any) -> None:
    """An optimizer step on the gradients that there are."""
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def read_lines(file: Path) -> list[Row]:
    """The rows of a file with one on each line, none where it is not there, and no last one that was cut off."""
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def read_rows(file: Path) -> list[Row]:
    """Those of a file, none where it is not there."""
    return list(json.loads(file.read_text())) if file.is_file() else []


def write_rows(rows: Sequence[Row], file: Path) -> None:
    """A line each. Whoever reads the file meanwhile finds what was there before.

    Raises UserMistake if there are none, which would erase what is there.
    """
    if not rows:
        raise UserMistake(f"There are no runs for {file}: make some without --report.")
    lines = ",\n".join(json.dumps(row, allow_nan=False, separators=(",", ":")) for row in rows)
    write_whole(file, f"[\n{lines}\n]\n".encode())


@contextmanager
def locked(lock: Path) -> Iterator[None]:
    """Wait until no other process is in the block of this lock."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def claim(path: Path, lock: Path) -> bool:
    """Whether this process may make a run: nobody that lives works on it, as the file `path` tells the others."""
    with locked(lock):
        if path.is_file() and psutil.pid_exists(int(path.read_text() or 0)):
            return False
        path.write_text(str(os.getpid()))
    return True


def build_model(
    hidden_size: int, layers: int, vocabulary: int, kind: type[LlamaForCausalLM] = LlamaForCausalLM, **options: Any
) -> LlamaForCausalLM:
    """Always the same weights; attention heads of 64. Token 0 pads, token 1 ends a text, unless `options` differ."""
    torch.manual_seed(0)
    fields = {
        "vocab_size": vocabulary,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden_size // 64,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    return kind(LlamaConfig(**{**fields, **options}))


def build_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """The number of a token is its text."""
    words = Tokenizer(models.WordLevel({str(i): i for i in range(vocabulary)}, unk_token="2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", padding_side="left")
