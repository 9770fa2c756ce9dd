"""What a world of the stability benchmark must know: its data, a policy to start from, and how a policy is judged."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

POLICY = "policy"


class BenchmarkWorld(ABC):
    """Tasks to train on, others to be judged by, and a policy that has just learnt to act.

    A seed decides the tasks, the policy's first weights and what it imitated; where several seeds share a policy, it
    decides the tasks alone. Everything else is the same for all seeds, and `settings` says it.
    """

    title: str
    description: str
    max_completion_length: int
    """Tokens of a trajectory, the prompt aside."""

    @property
    @abstractmethod
    def most_turns(self) -> int:
        """That a trajectory can have."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Of its folder; worlds with different data or policies have different ones."""

    @property
    @abstractmethod
    def settings(self) -> tuple[object, ...]:
        """All that decides a run in it, besides the code; the `repr` of each shows its whole content."""

    @abstractmethod
    def build(self, seed: int, target: Path, cache: Path) -> Path:
        """Write the data into `target`, and return the folder of the policy, which may be in `cache`."""

    @abstractmethod
    def trainer_arguments(self, folder: Path) -> dict[str, Any]:
        """What a trainer is given besides model, tokenizer and config: data, rewards, and how it acts.

        Args:
            folder: as `prepare` returned it.
        """

    @abstractmethod
    def examination(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> Examination:
        """The tasks that judge; their data is read once per run."""

    def prepare(self, seed: int, folder: Path) -> Path:
        """Make the data and the policy of a seed in `folder`, once; the policy is in its subfolder `policy`."""
        target = folder / f"{self.name}-{seed}"
        if not (target / POLICY).is_dir():
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            policy = self.build(seed, target, folder / "cache")
            shutil.copytree(policy, target / "part")
            (target / "part").rename(target / POLICY)
        return target


class Examination(ABC):
    """Tasks that nobody trained on, always the same ones."""

    @abstractmethod
    def score(self, model: PreTrainedModel, config: GenerationConfig) -> float:
        """The share of its tasks that the policy solves, in [0, 1]; the model is in evaluation mode."""
