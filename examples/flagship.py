"""Trains with `train_my_agent.py`, as it stands, and writes one page about the run: `make flagship` starts it.

On a GPU, Qwen3-0.6B makes 50 steps, with vLLM. On a CPU, SmolLM2-135M first learns to call the tool, and then makes a
few short steps, in 12 minutes: this shows the path, not the result. Further options go to the script.

example: python -m examples.flagship --model Qwen/Qwen3-4B --max_steps 100
"""

import os
import runpy
import shlex
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import psutil
import torch
from docs.pictures import BLUE, Plot, svg, text
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, TrainerState
from trl import get_peft_config

from examples import tool_imitation, train_my_agent
from examples.quickstart import WorldSize, build_atlas
from sorl_trl import EndpointRollout, SOGRPOTrainer
from sorl_trl.cli.dry_run import GIB, REMEDIES, available_bytes, estimate
from sorl_trl.command_line import Parser, UserMistake, run_command

SCRIPT = "examples/train_my_agent.py"
ON_GPU = "--use_vllm --max_steps 50"
ON_CPU = (
    "--use_cpu --bf16 false --dtype float32 --gradient_checkpointing false --learning_rate 2e-4 --max_turn_tokens 48 "
    "--max_completion_length 512 --per_device_train_batch_size 2 --gradient_accumulation_steps 4 "
    "--steps_per_generation 16 --max_steps 16 --save_trajectories_steps 1"
)
"""Rollouts of 32 trajectories, with four updates each."""
PROMPT = 256
"""Room for the script's prompt, in tokens."""
VLLM_BESIDES = 3 * GIB
"""What vLLM needs besides the weights, above all for keys and values of one whole context: our guess."""
PHASES = {"generating": EndpointRollout.roll_out, "training": SOGRPOTrainer.train}
"""What the script is in during each phase; the second calls the first."""
PACKAGES = ("sorl-trl", "torch", "transformers", "trl", "peft", "vllm")
PAGE = """# {title}

`make flagship` ran `{script}`, in which {model} looks real facts up.

| | |
| --- | --- |
{rows}

![Reward of each rollout](reward.svg)

```bash
{command}
```

`trainer_state.json` has all metrics, and `sorl view {folder}` shows trajectories. The end of
[what it printed](log.txt):

```text
{log}
```
"""


def main(words):
    if words[:1] == ["--measured"]:
        return measured(words[1:])
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # for one process
    began, on_gpu = time.monotonic(), torch.cuda.is_available()
    parser = Parser(prog="python -m examples.flagship", description=__doc__)
    default = "Qwen/Qwen3-0.6B" if on_gpu else "models/smollm2-135m"
    parser.add_argument("--model", default=default, help="its folder or Hub id (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/flagship"), help="(default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="only see whether the GPU has enough memory")
    options, more = parser.parse_known_args(words)
    folder, world = options.output, options.output / "world"
    given = {"model_name_or_path": options.model if on_gpu else folder / "warm-start", "output_dir": folder}
    given |= {"questions": world / "train.jsonl", "held_out": world / "eval.jsonl", "corpus": world / "corpus.jsonl"}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    words += [*(ON_GPU if on_gpu else ON_CPU).split(), *more]
    if options.check or not on_gpu:  # on a CPU, before the warm start, which takes minutes
        check_memory([*words, "--model_name_or_path", options.model])
    if options.check:
        return
    if not on_gpu:
        try:
            with ProcessPoolExecutor(1, get_context("spawn")) as process:  # whose memory is then free
                process.submit(warm_start, options.model, folder).result()
        except BrokenProcessPool as error:
            raise UserMistake("the warm start was killed, probably because memory ran out") from error
    build_atlas(0, WorldSize(evaluation_questions=400 if on_gpu else 32), plain=True).write(world)
    log = folder / "log.txt"
    child = shlex.join([sys.executable, "-u", "-m", "examples.flagship", "--measured", *words])
    command = f"{child} | tee {shlex.quote(str(log))}"  # bars and errors are not in the log
    if code := subprocess.run(["bash", "-o", "pipefail", "-c", command]).returncode:
        raise UserMistake(f"training ended with exit code {code}")
    write_page(options.model, folder, words, (time.monotonic() - began) / 3600)


def warm_start(model, folder):
    train_my_agent.args.corpus = str(folder / "practice/corpus.jsonl")
    tool_imitation.main(model, folder, train_my_agent.agent, examples=64, batch_size=4)


def check_memory(words):
    """Estimate what a step needs, as `sorl train --dry_run` does. Of the model, only its shape is downloaded."""
    _, config, model = train_my_agent.options(words)
    shape = AutoConfig.from_pretrained(model.model_name_or_path)
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, model.dtype))
        if adapter := get_peft_config(model):
            policy = get_peft_model(policy, adapter)
    there = available_bytes(config.device)
    needed = estimate(policy, config, config.max_completion_length + PROMPT, there)
    rows = {**needed.rows, "training": needed.training, "generating": needed.generating, "there is": there}
    print("Memory:", ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in rows.items()), flush=True)
    if needed.peak > there:
        raise UserMistake(f"a step needs about {needed.peak / GIB:.1f} of {there / GIB:.1f} GiB. {REMEDIES}")
    least = needed.rows["weights"] + VLLM_BESIDES
    if least > needed.rows.get("vLLM", least):
        share = f"--vllm_gpu_memory_utilization {least / there + 0.005:.2f}"
        raise UserMistake(f'vLLM needs about {least / GIB:.1f} GiB: make flagship OPTIONS="{share}"')


def measured(words):
    """Run the script in this process, and print the peak memory of each phase."""
    check_memory(words)
    peaks, main_thread = dict.fromkeys((*PHASES, "otherwise"), 0), threading.get_ident()

    def watch():
        while True:
            stack = {frame.f_code for frame, _ in traceback.walk_stack(sys._current_frames()[main_thread])}
            phase = next((name for name, function in PHASES.items() if function.__code__ in stack), "otherwise")
            peaks[phase] = max(peaks[phase], used())
            time.sleep(0.1)

    threading.Thread(target=watch, daemon=True).start()
    sys.argv = [SCRIPT, *words]
    runpy.run_path(SCRIPT, run_name="__main__")
    print("Peak memory:", ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in peaks.items()))


def used():
    """Bytes in use on the GPU, by whatever process, as `nvidia-smi` counts them; without a GPU, by this process."""
    if not torch.cuda.is_available():
        return psutil.Process().memory_info().rss
    return torch.cuda.device_memory_used() if torch.cuda.is_initialized() else 0


def write_page(model, folder, words, hours):
    log = (folder / "log.txt").read_text(errors="replace").splitlines()
    entries = TrainerState.load_from_json(folder / "trainer_state.json").log_history
    said = {
        name: line.split(": ", 1)[1] for line in log for name in ("Held-out reward", "Peak memory") if name in line
    }
    speeds = [entry["rollout/tokens_per_second"] for entry in entries if "rollout/tokens_per_second" in entry]
    steps, on_gpu = max(entry["step"] for entry in entries), torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else f"a CPU ({torch.get_num_threads()} threads)"
    rows = {
        **said,
        "Tokens sampled a second": f"{fmean(speeds):,.0f}, mean of {len(speeds)} rollouts",
        "Hours": f"{hours:.2f} in all, for {steps} steps",
        "Device": device,
        "Versions": ", ".join(f"{name} {version(name)}" for name in PACKAGES if find_spec(name.replace("-", "_"))),
    }
    note = "" if on_gpu else "A CPU run of a small model, which shows the path, not the result: "
    page = PAGE.format(
        title=f"{note}{model} after {steps} steps on {device}",
        script=SCRIPT,
        model=model,
        rows="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        command=f"python {SCRIPT} {shlex.join(words)}",
        folder=folder,
        log="\n".join(log[-20:]),
    )
    (folder / "reward.svg").write_text(curve([(each["step"], each["reward"]) for each in entries if "reward" in each]))
    (folder / "README.md").write_text(page)
    print(f"\nThe page: {folder / 'README.md'}")


def curve(points):
    plot = Plot(48, 44, 464, 200, (0, points[-1][0]), (0, 1))
    drawn = [text(16, 26, "Reward of each rollout, by step", 14, bold=True), plot.curve(points, BLUE)]
    return svg(230, drawn + plot.grid((0.0, 0.25, 0.5, 0.75, 1.0), {step: str(step) for step, _ in points}))


if __name__ == "__main__":
    sys.exit(run_command(main))
