"""Optional libraries that a run asks for: what is missing is said before anything is loaded.

DeepSpeed is not among them: accelerate and transformers ask for it as early.
"""

from __future__ import annotations

from importlib.util import find_spec

from trl import ModelConfig

from sorl_trl.trainers.config import TurnLevelConfig

PACKAGES = {
    "vllm": "'sorl-trl[vllm]'",
    "bitsandbytes": "bitsandbytes",
    "comet_ml": "comet-ml",
    **{name: name for name in ("mlflow", "swanlab", "tensorboard", "trackio", "wandb")},
}
"""Module -> what `pip install` calls it."""


def check_libraries(config: TurnLevelConfig, model: ModelConfig) -> None:
    """Raise ValueError for the first library that is asked for and not installed."""
    bits = "load_in_4bit" if model.load_in_4bit else "load_in_8bit"
    asked = {
        "`use_vllm`": "vllm" if config.use_vllm else "",
        f"`{bits}`": "bitsandbytes" if getattr(model, bits) else "",
        f"`optim` {config.optim!r}": "bitsandbytes" if "8bit" in config.optim else "",
        **{f"`report_to` {tracker!r}": tracker for tracker in config.report_to},
    }
    for option, module in asked.items():
        if module in PACKAGES and find_spec(module) is None:
            raise ValueError(f"{option} needs {module}, which is not installed: pip install {PACKAGES[module]}")
