"""Plans the batches, which are the same for any number of processes and after an interruption."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sorl_trl.evaluation.arguments import EvaluationArguments
from sorl_trl.qa import Question, load_benchmark
from sorl_trl.rollout import RolloutArguments
from sorl_trl.rollout.tasks import load_rows


@dataclass(frozen=True)
class Batch:
    """Trajectories that advance together, all of one dataset."""

    dataset: str
    index: int
    """Its number among the batches of its dataset, from 0."""
    samples: tuple[tuple[Question, int], ...]
    """Pairs of a question and the number of the trajectory among the question's, from 0."""

    def seed(self, run_seed: int) -> int:
        """The seed of the batch, which depends only on the run's seed, the dataset and the index."""
        return random.Random(f"{run_seed}/{self.dataset}/{self.index}").getrandbits(63)


def load_datasets(arguments: EvaluationArguments, rollout: RolloutArguments) -> dict[str, list[Question]]:
    """Load the questions that the arguments name, by dataset, or tasks where `rollout` does not search.

    Raises:
        ValueError: A benchmark is unknown, or a file or folder is not in its schema.
        FileNotFoundError: `data_source_folder` lacks a benchmark, or there is no such file.
    """
    datasets = {name: _load_benchmark(name, arguments)[: arguments.limit] for name in arguments.benchmarks}
    for path in arguments.questions:
        datasets[Path(path).stem] = load_rows(path, rollout)[: arguments.limit]
    return datasets


def _load_benchmark(name: str, arguments: EvaluationArguments) -> list[Question]:
    folder = arguments.data_source_folder
    return load_benchmark(name, source=None if folder is None else Path(folder) / name, limit=arguments.limit)


def plan_batches(datasets: Mapping[str, Sequence[Question]], num_samples: int, batch_size: int) -> list[Batch]:
    """Plan the batches, dataset by dataset and question by question, with the samples of a question together."""
    batches = []
    for name, questions in datasets.items():
        samples = [(question, index) for question in questions for index in range(num_samples)]
        starts = range(0, len(samples), batch_size)
        batches += [Batch(name, i, tuple(samples[start : start + batch_size])) for i, start in enumerate(starts)]
    return batches


def questions_hash(questions: Sequence[Question]) -> str:
    """A hash of the content: different questions, golden answers or order give another hash."""
    content = json.dumps([asdict(question) for question in questions], default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
