"""One process under ZeRO-2, ZeRO-3 and FSDP2, and vLLM beside the trainer: each in a process of its own.

A check starts this module as a script, `accelerate launch --config_file … -m benchmarks.gpu_check.engines job.json`,
which trains under one engine, checks that it is that engine, and writes figures.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.common import QUIET
from benchmarks.fixed_lengths import VARIANTS, even_share
from benchmarks.gpu_check.checks import STEPS, Check, Context, Skipped, build, sizes_of, training_figures
from sorl_trl.files import write_whole

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 150.0
OUTPUT_LENGTH = 3000
"""Characters of a failed process's output that are kept."""
ZERO_STAGES = {"zero2": 2, "zero3": 3}
VLLM_OPTIONS = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.2}
MEAN_DIFFERENCE = 0.05
"""Of log-probabilities in bfloat16, between vLLM and the trainer: far more means that vLLM has other weights."""


def under(engine: str) -> Check:
    """SO-PPO with a head trains under `accelerate_configs/{engine}.yaml`."""

    def check(context: Context) -> dict[str, Any]:
        on_cpu = context.device == "cpu"
        if engine in ZERO_STAGES and find_spec("deepspeed") is None:
            raise Skipped("DeepSpeed is not installed")
        if engine == "fsdp2" and on_cpu:
            raise Skipped("without a GPU accelerate turns FSDP into DDP")
        folder = ROOT / ("tests/distributed/configs" if on_cpu else "accelerate_configs")
        config = folder / f"{engine}{'_cpu' if on_cpu else ''}.yaml"
        launcher = ["accelerate.commands.launch", "--config_file", str(config), "--num_processes", "1"]
        return in_a_process(context, engine, [*launcher, "--main_process_port", "0", "-m"])

    return check


def vllm_colocate(context: Context) -> dict[str, Any]:
    """SO-GRPO samples with vLLM on the GPU that it trains on; both see nearly the same log-probabilities."""
    if context.device == "cpu":
        raise Skipped("vLLM's CUDA build needs a GPU; `make test-vllm` runs its CPU build")
    if find_spec("vllm") is None:
        raise Skipped("vLLM is not installed")
    return in_a_process(context, "vllm", [])


def in_a_process(context: Context, engine: str, launcher: list[str], **job: str) -> dict[str, Any]:
    """What the process writes; AssertionError with the end of its output if it writes nothing in time."""
    path, result = context.folder / "job.json", context.folder / "result.json"
    path.write_text(json.dumps({"engine": engine, "device": context.device, **job}))
    command = [sys.executable, "-m", *launcher, "benchmarks.gpu_check.engines", str(path)]
    with (context.folder / "output.txt").open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, env=environment(context.device))
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # on which the launcher ends its workers
            process.wait(10.0)
    if not result.exists():  # processes now and then abort while they exit, after all is done
        output = (context.folder / "output.txt").read_text(errors="replace")[-OUTPUT_LENGTH:]
        raise AssertionError(f"It ended with {process.returncode} and left no result. Its output ends in:\n{output}")
    figures: dict[str, Any] = json.loads(result.read_text())
    return figures


def environment(device: str) -> dict[str, str]:
    """The package and the benchmarks are found where they are not installed; nothing is looked for in a network."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    added = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    if device == "cpu":
        added |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return {**os.environ, **added}


def check_engine(name: str, trainer: Any) -> None:
    """Raise AssertionError unless it ran under the engine: a wrong configuration falls back to less, silently."""
    wrapped = trainer.model_wrapped
    stage = wrapped.zero_optimization_stage() if hasattr(wrapped, "zero_optimization_stage") else 0
    kinds = sorted({type(weight.data).__name__ for weight in trainer.model.parameters()})
    assert stage == ZERO_STAGES.get(name, 0), f"ran under ZeRO {stage}, not {name}"
    assert ("DTensor" in kinds) == (name == "fsdp2"), f"ran with {kinds}, not {name}"


def sampling_figures(log_history: list[dict[str, Any]]) -> dict[str, Any]:
    """How far the log-probabilities that vLLM reports are from the trainer's, rollout by rollout.

    Raises:
        AssertionError: it was not logged after an update, or is more than bfloat16 explains.
    """
    name = "sampling/sampling_logp_difference/mean"
    means = [entry[name] for entry in log_history if name in entry]
    assert len(means) > 1, f"`{name}` was logged in {len(means)} steps: no update of vLLM's weights was seen"
    assert max(means) <= MEAN_DIFFERENCE, f"`{name}` is {max(means):.3g}, more than {MEAN_DIFFERENCE}"
    return {"logp_difference_means": means}


def train(context: Context, engine: str) -> dict[str, Any]:
    sizes = sizes_of(context)
    # The CPU's launch configurations have no mixed precision.
    options: dict[str, Any] = context.precision | ({"bf16": False} if context.device == "cpu" else {})
    if engine == "vllm":
        options |= {**VLLM_OPTIONS, "vllm_max_model_length": sizes.prompt + sizes.completion + 16}
        options["generation_kwargs"] = {"min_tokens": sizes.turn}  # vLLM's name for turns of one length
    trainer = build(VARIANTS["so_grpo" if engine == "vllm" else "head"], sizes, context.folder, **options)
    trainer.train()
    check_engine(engine, trainer)
    history = trainer.state.log_history
    return training_figures(history) | (sampling_figures(history) if engine == "vllm" else {})


FLAGS = ("--enforce-eager", "--gpu-memory-utilization=0.2", "--logprobs-mode=processed_logprobs", "--host=127.0.0.1")


def vllm_ahead(context: Context) -> dict[str, Any]:
    """The server begins with other weights: the run ends unless those of the trainer arrive, also after an update."""
    if context.other_gpu is None:
        raise Skipped("there is no second CUDA GPU here")
    if find_spec("vllm") is None:
        raise Skipped("vLLM is not installed")
    with serving(save_policy(context.folder / "other", seed=1), context) as url:
        return in_a_process(context, "ahead", [], url=url)


@contextmanager
def serving(policy: Path, context: Context) -> Iterator[str]:
    """A vLLM server on the other GPU; the address at which it will listen. The trainer waits for it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(policy), f"--port={port}", *FLAGS]
    command += ["--weight-transfer-config", '{"backend": "nccl"}']
    own = {"CUDA_VISIBLE_DEVICES": str(context.other_gpu), "VLLM_SERVER_DEV_MODE": "1"}
    with (context.folder / "server.txt").open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=environment(context.device) | own, start_new_session=True
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its engine is a process of its own
        process.wait()


class EmptySearch:
    """It finds nothing."""

    thread_safe = True

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Any]]:
        return [[] for _ in queries]


def save_policy(folder: Path, seed: int) -> Path:
    """A random policy, whose heads are 64 wide, with a tokenizer."""
    from examples.quickstart import PolicyConfig, make_policy, store_policy, word_tokenizer
    from examples.quickstart.imitation import TAGS

    tokenizer = word_tokenizer(["who found it"], TAGS)
    return store_policy(make_policy(tokenizer, PolicyConfig(hidden_size=128, heads=2), seed), tokenizer, folder)


def train_ahead(context: Context, url: str) -> dict[str, Any]:
    """Two updates of each of two rollouts, the second of which is sampled while the first is trained on."""
    from datasets import Dataset
    from examples.quickstart import LIMITS, PROTOCOL

    from sorl_trl import SearchRollout, SOGRPOConfig, SOGRPOTrainer

    config = SOGRPOConfig(
        str(context.folder / "out"),
        **{"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "async_staleness": 1},
        **{"per_device_train_batch_size": 8, "steps_per_generation": 2, "max_steps": STEPS, "learning_rate": 1e-3},
        **{"max_completion_length": LIMITS.max_trajectory_tokens, "lr_scheduler_type": "constant"},
        **{**QUIET, "logging_steps": 1, **context.precision},
    )
    policy, rows = str(save_policy(context.folder / "policy", seed=0)), Dataset.from_list([{"prompt": "who"}] * 8)
    rollout = SearchRollout(EmptySearch(), PROTOCOL, LIMITS)
    trainer = SOGRPOTrainer(policy, even_share, config, rows, rollout_func=rollout)
    trainer.train()
    history = trainer.state.log_history
    ages = [entry["async/age_max"] for entry in history if "async/age_max" in entry]
    assert ages == [0.0, 1.0], f"the rollouts were {ages} batches old, not [0, 1]"
    return training_figures(history) | {"ages": ages}


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    if job["engine"] in ZERO_STAGES:  # DeepSpeed would compile operations, of which none runs here
        import deepspeed
        from deepspeed.ops.op_builder.all_ops import ALL_OPS

        deepspeed.ops.__compatible_ops__ = dict.fromkeys([*ALL_OPS, "deepspeed_not_implemented"], False)
    context = Context(job["device"], Path(path).parent)
    figures = train_ahead(context, job["url"]) if job["engine"] == "ahead" else train(context, job["engine"])
    write_whole(Path(path).with_name("result.json"), json.dumps(figures).encode())


if __name__ == "__main__":
    main(sys.argv[1])
