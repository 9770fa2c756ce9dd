"""Optional libraries that a run asks for: what is missing is said before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

from trl import ModelConfig

from sorl_trl.trainers.config import TurnLevelConfig

PACKAGES = {
    "vllm": "'sorl-trl[vllm]'",
    "deepspeed": "'sorl-trl[deepspeed]'",
    "peft": "peft",
    "bitsandbytes": "bitsandbytes",
    "comet_ml": "comet-ml",
    **{name: name for name in ("mlflow", "swanlab", "tensorboard", "trackio", "wandb")},
}
"""Module -> what `pip install` calls it."""


def check_libraries(config: TurnLevelConfig, model: ModelConfig) -> None:
    """Raise ValueError for the first library that is asked for and not installed."""
    for option, module in _asked_for(config, model):
        if module in PACKAGES and find_spec(module) is None:
            raise ValueError(f"{option} needs {module}, which is not installed: pip install {PACKAGES[module]}")


def _asked_for(config: TurnLevelConfig, model: ModelConfig) -> Iterator[tuple[str, str]]:
    if config.use_vllm:
        yield "`use_vllm`", "vllm"
    if config.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        yield "DeepSpeed (`--accelerate_config`, `deepspeed`)", "deepspeed"
    if model.use_peft:
        yield "`use_peft`", "peft"
    if model.load_in_4bit or model.load_in_8bit:
        yield f"`load_in_{4 if model.load_in_4bit else 8}bit`", "bitsandbytes"
    if "8bit" in config.optim:
        yield f"`optim` {config.optim!r}", "bitsandbytes"
    for tracker in config.report_to:
        if tracker != "tensorboard" or find_spec("tensorboardX") is None:
            yield f"`report_to` {tracker!r}", tracker
