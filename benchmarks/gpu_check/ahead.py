"""SO-GRPO on one GPU, and on another a vLLM server that samples ahead of it: weights travel by NCCL."""

from __future__ import annotations

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

from benchmarks.gpu_check.engines import environment, in_a_process
from benchmarks.gpu_check.records import Context, Skipped

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

    from benchmarks.critic_cycles import even_share
    from benchmarks.gpu_check.training import STEPS, training_figures
    from sorl_trl import SearchRollout, SOGRPOConfig, SOGRPOTrainer

    config = SOGRPOConfig(
        str(context.folder / "out"),
        **{"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "async_staleness": 1},
        **{"per_device_train_batch_size": 8, "steps_per_generation": 2, "max_steps": STEPS, "learning_rate": 1e-3},
        **{"max_completion_length": LIMITS.max_trajectory_tokens, "lr_scheduler_type": "constant"},
        **{"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True},
        **context.precision,
    )
    policy, rows = str(save_policy(context.folder / "policy", seed=0)), Dataset.from_list([{"prompt": "who"}] * 8)
    rollout = SearchRollout(EmptySearch(), PROTOCOL, LIMITS)
    trainer = SOGRPOTrainer(policy, even_share, config, rows, rollout_func=rollout)
    trainer.train()
    history = trainer.state.log_history
    ages = [entry["async/age_max"] for entry in history if "async/age_max" in entry]
    assert ages == [0.0, 1.0], f"the rollouts were {ages} batches old, not [0, 1]"
    return training_figures(history) | {"ages": ages}
