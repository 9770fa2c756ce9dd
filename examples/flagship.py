"""Trains with `train_my_agent.py`, as it stands, and writes one page about the run: `make flagship` starts it.

On a GPU, Qwen3-0.6B makes 50 steps, with vLLM. On a CPU, SmolLM2-135M first learns to call the tool, and then makes a
few short steps: this shows the path, not the result.

example: python -m examples.flagship --model Qwen/Qwen3-4B --max_steps 100
"""

from __future__ import annotations

import os
import platform
import runpy
import shlex
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import torch
from docs.pictures import BLUE, Plot, svg, text
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, TrainerState
from trl import get_peft_config

from examples import tool_imitation, train_my_agent
from examples.quickstart import WorldSize, build_atlas
from sorl_trl import EndpointRollout
from sorl_trl.cli.dry_run import GIB, REMEDIES, available_bytes, estimate
from sorl_trl.command_line import Parser, UserMistake, run_command

SCRIPT = "examples/train_my_agent.py"
ON_GPU = "--use_vllm --max_steps 50"
ON_CPU = (
    "--use_cpu --bf16 false --dtype float32 --gradient_checkpointing false --learning_rate 2e-4 --max_turn_tokens 48 "
    "--max_completion_length 256 --per_device_train_batch_size 4 --gradient_accumulation_steps 2 "
    "--steps_per_generation 8 --max_steps 20"
)
"""Rollouts of 32 trajectories, with four updates each."""
PROMPT = 256
"""Room for the script's prompt, in tokens."""
VLLM_BESIDES = 3 * GIB
"""What vLLM needs besides the weights, above all for keys and values of one whole context: our guess."""
PACKAGES = ("sorl-trl", "torch", "transformers", "trl", "peft", "vllm")
PAGE = """# {title}

Started by `make flagship`: `{script}` asked {model} questions about real facts, whose answers it has to
look up.

| | |
| --- | --- |
{rows}

![Reward of each rollout](reward.svg)

```bash
{command}
```

`trainer_state.json` has all metrics, and `sorl view {folder}` shows trajectories. The last lines of [the log](log.txt):

```text
{log}
```
"""


def main(words: Sequence[str]) -> int:
    if words[:1] == ["--measured"]:
        return measured(words[1:])
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # for one process
    options, more = parse(words)
    on_gpu, folder = torch.cuda.is_available(), options.output
    policy = options.model if on_gpu else f"{folder}/warm-start"
    given = {"model_name_or_path": policy, "output_dir": folder, "corpus": f"{folder}/world/corpus.jsonl"}
    given |= {"questions": f"{folder}/world/train.jsonl", "held_out": f"{folder}/world/eval.jsonl"}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    words += [*(ON_GPU if on_gpu else ON_CPU).split(), *more]
    if options.check:
        return check_memory(words)
    began = time.monotonic()
    if not on_gpu:
        agent = partial(train_my_agent.agent, corpus=f"{folder}/practice/corpus.jsonl")
        with ProcessPoolExecutor(1, get_context("spawn")) as process:  # whose memory is then free
            process.submit(tool_imitation.main, options.model, folder, agent, examples=64, batch_size=4).result()
    size = WorldSize(evaluation_questions=400 if on_gpu else 32)
    build_atlas(0, size, plain=True).write(folder / "world")
    if code := run(words, folder / "log.txt"):
        raise UserMistake(f"training ended with exit code {code}: see {folder / 'log.txt'}")
    write_page(options, words, (time.monotonic() - began) / 3600)
    return 0


def parse(words: Sequence[str]) -> tuple[Namespace, list[str]]:
    parser = Parser(prog="python -m examples.flagship", description=__doc__)
    default = "Qwen/Qwen3-0.6B" if torch.cuda.is_available() else "models/smollm2-135m"
    parser.add_argument("--model", default=default, help="its folder or Hub id (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/flagship"), help="(default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="only see whether the GPU has enough memory")
    return parser.parse_known_args(words)


def check_memory(words: Sequence[str]) -> int:
    """Estimate what a step needs, as `sorl train --dry_run` does. Of the model, only its shape is downloaded."""
    _, config, model = train_my_agent.options(words)
    shape = AutoConfig.from_pretrained(model.model_name_or_path)
    with torch.device("meta"):
        policy: Any = AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, model.dtype))
        if adapter := get_peft_config(model):
            policy = get_peft_model(policy, adapter)
    there = available_bytes(config.device)
    needed = estimate(policy, config, config.max_completion_length + PROMPT, there)
    rows = {**needed.rows, "training": needed.training, "generating": needed.generating, "there is": there}
    print("Memory:", ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in rows.items()), flush=True)
    if needed.peak > there:
        raise UserMistake(
            f"a step needs about {needed.peak / GIB:.1f} GiB, but there are {there / GIB:.1f}. {REMEDIES}"
        )
    least = needed.rows["weights"] + VLLM_BESIDES
    if least > needed.rows.get("vLLM", least):
        share = f"--vllm_gpu_memory_utilization {least / there + 0.005:.2f}"
        raise UserMistake(f'vLLM needs about {least / GIB:.1f} GiB: make flagship OPTIONS="{share}"')
    return 0


def run(words: Sequence[str], log: Path) -> int:
    """Train in a process of its own. What it prints also goes into the log."""
    command = [sys.executable, "-m", "examples.flagship", "--measured", *words]
    with (
        log.open("wb") as file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process,
    ):
        while chunk := process.stdout.read1():
            file.write(chunk)
            sys.stdout.buffer.write(chunk)
            sys.stdout.flush()
    return process.returncode


def measured(words: Sequence[str]) -> int:
    """Run the script with these options, and print the peak memory of each phase."""
    check_memory(words)
    peaks, phase = dict.fromkeys(("loading", "generating", "training"), 0), "loading"
    roll_out: Any = EndpointRollout.__call__

    def watch() -> None:
        while True:
            peaks[phase] = max(peaks[phase], used())
            time.sleep(0.1)

    def watched(*given: Any) -> Any:
        nonlocal phase
        phase = "generating"
        try:
            return roll_out(*given)
        finally:
            phase = "training"

    EndpointRollout.__call__ = watched
    threading.Thread(target=watch, daemon=True).start()
    sys.argv = [SCRIPT, *words]
    runpy.run_path(SCRIPT, run_name="__main__")
    print("Peak memory:", ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in peaks.items()))
    return 0


def used() -> int:
    """Bytes in use on the GPU, by whatever process, as its driver counts them; without a GPU, by this process."""
    if not torch.cuda.is_initialized():
        return 0 if torch.cuda.is_available() else psutil.Process().memory_info().rss
    free, there = torch.cuda.mem_get_info()
    return there - free


def write_page(options: Namespace, words: Sequence[str], hours: float) -> None:
    printed = (options.output / "log.txt").read_bytes().decode(errors="replace").split("\n")
    log = [line.rpartition("\r")[2].replace("\x1b[A", "").rstrip() for line in printed]  # a bar as it was last
    entries = TrainerState.load_from_json(options.output / "trainer_state.json").log_history
    said = {
        title: line.partition(": ")[2] for line in log for title in ("Held-out reward", "Peak memory") if title in line
    }
    speeds = [entry["rollout/tokens_per_second"] for entry in entries if "rollout/tokens_per_second" in entry]
    steps, on_gpu = max(entry["step"] for entry in entries), torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()}, {torch.get_num_threads()} threads"
    rows = {
        **said,
        "Tokens sampled a second": f"{fmean(speeds):,.0f}, mean of {len(speeds)} rollouts",
        "Hours": f"{hours:.2f}, of {steps} steps and all else",
        "Device": device,
        "Versions": ", ".join(f"{name} {version(name)}" for name in PACKAGES if find_spec(name.replace("-", "_"))),
    }
    result = f"{options.model} after {steps} steps on {device}"
    page = PAGE.format(
        title=result if on_gpu else f"A CPU run of a small model: it shows the path, not the result ({result})",
        script=SCRIPT,
        model=options.model,
        rows="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        command=f"python {SCRIPT} {shlex.join(words)}",
        folder=options.output,
        log="\n".join([line for line in log if line][-20:]),
    )
    (options.output / "reward.svg").write_text(curve([(e["step"], e["reward"]) for e in entries if "reward" in e]))
    (options.output / "README.md").write_text(page)
    print(f"The page: {options.output / 'README.md'}")


def curve(points: Sequence[tuple[int, float]]) -> str:
    plot = Plot(48, 44, 464, 200, (points[0][0], points[-1][0]), (0, 1))
    drawn = [text(16, 26, "Reward of each rollout, by step", 14, bold=True), plot.curve(points, BLUE)]
    return svg(230, drawn + plot.grid((0.0, 0.25, 0.5, 0.75, 1.0), {step: str(step) for step, _ in points}))


if __name__ == "__main__":
    sys.exit(run_command(main))
