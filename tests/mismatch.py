"""Trainers that believe in vLLM, and a rollout whose log-probabilities are made up: no engine runs here."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

from tests.trajectories import FixedRollout

UNIFORM = -math.log(32)
"""About the log-probability of any token under the tiny policy."""


class SampledElsewhere(FixedRollout):
    """An engine whose log-probabilities are some way off, NaN for some tokens, and 0 where it has sampled nothing."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        first = trainer.accelerator.process_index * len(prompts)
        output["logprobs"] = [self._said(first + i, mask) for i, mask in enumerate(output["env_mask"])]
        return output

    def _said(self, index: int, mask: list[int]) -> list[float]:
        rng = random.Random(f"{self.calls}-{index}")
        said = [rng.gauss(UNIFORM, 0.3) if rng.random() < 0.9 else math.nan for _ in mask]
        return [logp if kept else 0.0 for logp, kept in zip(said, mask, strict=True)]


def with_engine(trainer_class: Any) -> Any:
    class WithEngine(trainer_class):  # type: ignore[misc]
        """Believes that vLLM generates."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.use_vllm = self.vllm_importance_sampling_correction = True
            self.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
            self._last_loaded_step = -1

    return WithEngine
