"""Runs an evaluation in resumable batches: plans, generates, scores, saves, and reports.

The batches are the same for any number of processes and after an interruption.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from tqdm.auto import tqdm

from sorl_trl import qa
from sorl_trl.command_line import mistakes
from sorl_trl.evaluation.arguments import Arguments, EvaluationArguments
from sorl_trl.evaluation.figures import format_results, summarize
from sorl_trl.evaluation.policy import EvaluatedPolicy, Parts, generation_config
from sorl_trl.files import write_whole
from sorl_trl.qa import Question
from sorl_trl.records.evaluated import (
    FOLDER,
    MEASURES,
    POLICY_HASH,
    RESULTS,
    SCORES,
    SETTINGS,
    TABLE,
    Outcome,
    evaluated_shards,
    files_hash,
    is_masked,
    read_outcomes,
    read_settings,
    row_of,
    why_stale,
    write_evaluated,
)
from sorl_trl.rollout import RolloutArguments, rollout_statistics
from sorl_trl.rollout.tasks import check_questions, check_read, load_rows, unread
from sorl_trl.rollout.trajectories import decode
from sorl_trl.search import MalformedResponse, SearchUnavailable
from sorl_trl.types import Trajectory

if TYPE_CHECKING:  # it takes seconds
    from sorl_trl.rollout.policy_rollout import PolicyRollout

SAMPLING = ("num_samples", "temperature", "batch_size", "seed", "rollout_engine", "rejoin_after")
LONGEST_WAIT = timedelta(days=7)
"""How long a finished process waits for the others; process groups' default is minutes."""
_LOST = (
    "the search engine, the environment or a service of the agent was down, or the agent exceeded "
    "`agent_time_limit_s`, raised an error before its first call, or made no call (`no_call`: did a cache answer?)"
)
LOST_BATCHES = 3
"""A run stops after this many batches in a row with every trajectory masked: something is down or too slow."""


def run_evaluation(arguments: Arguments) -> None:
    """Run the rest of an evaluation, shared with other processes if there are any, and report."""
    evaluation, parts = arguments.evaluation, arguments.parts
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=LONGEST_WAIT)
    with mistakes(), state.main_process_first():  # so that downloads and indexes are made once
        datasets = load_datasets(evaluation, parts.rollout)
        questions = [question for each in datasets.values() for question in each]
        check_read(parts.rollout, questions, arguments.given)
        in_chat = not isinstance(parts.rows(questions)[0]["prompt"], str)
        parts.check(in_chat)
        run = RunFolder(evaluation.output)
        run.claim(run_settings(evaluation, parts, datasets))
    batches = plan_batches(datasets, evaluation.num_samples, evaluation.batch_size)
    try:
        complete(
            run,
            batches[state.process_index :: state.num_processes],
            lambda: load_evaluated(evaluation, parts, in_chat, state.device),
            evaluation.seed,
            show_progress=state.is_main_process,
        )
    except (SearchUnavailable, MalformedResponse) as error:
        raise ConnectionError(str(error)) from error  # each process reports it, as others may not have met it
    state.wait_for_everyone()
    masked = 0
    if state.is_main_process:
        summaries = {name: summarize(name, run.outcomes(name)) for name in datasets}
        masked = sum(summary["masked"] for summary in summaries.values())
        table = format_results(list(summaries.values()))
        run.finish({"datasets": summaries, "settings": read_settings(run.path)}, table)
        print(f"{table}\nResults and trajectories: {run.path}")
    state.destroy_process_group()
    if masked:
        raise SystemExit(
            f"{masked} trajectories were lost because {_LOST}. The means above leave them out and may be biased: run "
            "the same command again to repeat them."
        )


def load_datasets(arguments: EvaluationArguments, rollout: RolloutArguments) -> dict[str, list[Question]]:
    """Load the questions named in the arguments, by dataset, or tasks if `rollout` does not search.

    Raises:
        ValueError: A file is not in the schema.
        FileNotFoundError: There is no such file.
    """
    datasets = {}
    for path in arguments.questions:
        check_questions("questions", path)
        datasets[Path(path).stem] = load_rows(path, rollout)[: arguments.limit]
    return datasets


def load_evaluated(
    evaluation: EvaluationArguments, parts: Parts, in_chat: bool, device: torch.device
) -> EvaluatedPolicy:
    """Load the policy, with its rollout as in training, and an engine that samples as trainers do."""
    with mistakes():
        rollout, sampling = parts.rollout_func, generation_config(evaluation.temperature)
        setup, engine = parts.load(device, sampling, in_chat, rollout.stop_strings)
    return EvaluatedPolicy(rollout, setup, engine, parts.rows)


def run_settings(
    evaluation: EvaluationArguments, parts: Parts, datasets: Mapping[str, Sequence[Question]]
) -> dict[str, Any]:
    """All settings that determine the outcome of a run, so not its output folder or number of processes."""
    path = Path(parts.model.model_name_or_path)
    name = str(path.resolve() if path.exists() else path)
    rollout = {**asdict(parts.rollout), "max_completion_length": evaluation.max_completion_length}
    rollout = {name: value for name, value in rollout.items() if name not in unread(parts.rollout)}
    rollout["chat_template_kwargs"] = evaluation.template_kwargs or None
    return {
        "model": {**asdict(parts.model), "model_name_or_path": name, POLICY_HASH: files_hash(name)},
        "rollout": rollout,
        "sampling": {name: {**vars(evaluation), **vars(parts.engine)}[name] for name in SAMPLING},
        "search": parts.built_search and parts.built_search.identity,
        "datasets": {
            name: {"questions": len(questions), "content": questions_hash(questions)}
            for name, questions in datasets.items()
        },
    }


def questions_hash(questions: Sequence[Question]) -> str:
    """A hash of the content: it changes with questions, golden answers or order."""
    content = json.dumps([asdict(question) for question in questions], default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Batch:
    """Trajectories that are generated at once, all from one dataset."""

    dataset: str
    index: int
    """Its number among the batches of its dataset, from 0."""
    samples: tuple[tuple[Question, int], ...]
    """Pairs of a question and the trajectory's number for that question, from 0."""

    def seed(self, run_seed: int) -> int:
        """The seed of the batch, which depends only on the run's seed, the dataset and the index."""
        return random.Random(f"{run_seed}/{self.dataset}/{self.index}").getrandbits(63)


def plan_batches(datasets: Mapping[str, Sequence[Question]], num_samples: int, batch_size: int) -> list[Batch]:
    """Plan the batches, dataset by dataset and question by question, with a question's samples adjacent."""
    batches = []
    for name, questions in datasets.items():
        samples = [(question, index) for question in questions for index in range(num_samples)]
        starts = range(0, len(samples), batch_size)
        batches += [Batch(name, i, tuple(samples[start : start + batch_size])) for i, start in enumerate(starts)]
    return batches


class RunFolder:
    """The folder of an evaluation: see `sorl_trl.records.evaluated`. Processes share it, each with its own batches."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def claim(self, settings: Mapping[str, Any]) -> None:
        """Start a run here, or continue the one that was started with the same settings.

        Every process may call this, with equal settings.

        Raises:
            ValueError: The run was started with other settings (the message names the first), or the policy has
                changed.
        """
        file = self.path / SETTINGS
        # A start that finished no batch, perhaps with a wrong model, does not fix the settings.
        if not any((self.path / FOLDER).rglob("[0-9]*.parquet")):
            self.path.mkdir(parents=True, exist_ok=True)
            if file.exists():
                read_settings(self.path)  # raises ValueError if something else wrote them
            _write_json(file, settings)
            return
        before, now = read_settings(self.path), json.loads(json.dumps(settings))
        policies = [each.get("model", {}) for each in (before, now)]
        if policies[0].get(POLICY_HASH) and policies[0][POLICY_HASH] == policies[1].get(POLICY_HASH):
            policies[1]["model_name_or_path"] = policies[0].get("model_name_or_path")  # it may have been moved
        elif problem := why_stale(self.path):
            raise ValueError(problem)
        lines = (json.dumps(each, indent=0, sort_keys=True).splitlines() for each in (before, now))
        for old, new in zip_longest(*lines, fillvalue="missing"):
            if old != new:
                raise ValueError(
                    f"output {self.path} has a run with other settings: {old.rstrip(',')} there, {new.rstrip(',')} "
                    "here. Use the same settings to continue it, or choose another folder (`--output`)"
                )

    def shard(self, batch: Batch) -> Path:
        """The file of a batch."""
        return self.path / FOLDER / batch.dataset / f"{batch.index:06d}.parquet"

    def has(self, batch: Batch) -> bool:
        """Whether a batch is finished and no infrastructure failure ended any of its trajectories."""
        shard = self.shard(batch)
        return shard.exists() and not any(map(is_masked, read_outcomes([shard])))

    def outcomes(self, dataset: str) -> list[Outcome]:
        """The outcomes of all finished batches of a dataset, in the order of the plan."""
        return read_outcomes(evaluated_shards(self.path, dataset))

    def finish(self, results: Mapping[str, Any], table: str) -> None:
        write_whole(self.path / TABLE, table.encode())
        _write_json(self.path / RESULTS, results)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    write_whole(path, text.encode())


def complete(
    run: RunFolder,
    batches: Sequence[Batch],
    load: Callable[[], EvaluatedPolicy],
    seed: int,
    show_progress: bool = True,
) -> None:
    """Run the batches that `run` still lacks, with a progress bar, and save each as soon as it is finished.

    Batches with a trajectory ended by an infrastructure failure are repeated, because the cause may be gone. The
    policy is loaded only if work is left. `batches` are all batches of this process.

    Raises:
        SearchUnavailable: Every trajectory of `LOST_BATCHES` batches in a row was masked.
    """
    todo = [batch for batch in batches if not run.has(batch)]
    if not todo:
        return
    total, left = (sum(len(batch.samples) for batch in part) for part in (batches, todo))
    with tqdm(total=total, initial=total - left, desc="Evaluating", disable=not show_progress) as bar:
        lost = 0
        for batch, rows in run_batches(todo, load(), seed):
            write_evaluated(run.shard(batch), rows)
            bar.update(len(rows))
            lost = lost + 1 if all(map(is_masked, rows)) else 0
            if lost == LOST_BATCHES:
                raise SearchUnavailable(
                    f"all trajectories of {lost} batches in a row were lost because {_LOST}: mend that, and run the "
                    "same command again to continue. A longer limit needs another `--output`"
                )


def run_batches(
    batches: Iterable[Batch], policy: EvaluatedPolicy, seed: int
) -> Iterator[tuple[Batch, list[dict[str, Any]]]]:
    """Yield each batch with the rows of its trajectories (`records.evaluated.SCHEMA`), as soon as they are finished.

    Torch is seeded for each batch, so samples do not depend on earlier batches.
    """
    for batch in batches:
        rows = policy.rows([question for question, _ in batch.samples])
        torch.manual_seed(batch.seed(seed))
        found, _ = policy.rollout.collect(policy.setup, [row["prompt"] for row in rows], rows, policy.engine)
        yield batch, [_evaluated(batch, policy, row, each) for row, each in enumerate(found)]


def _evaluated(batch: Batch, policy: EvaluatedPolicy, row: int, trajectory: Trajectory) -> dict[str, Any]:
    question, sample = batch.samples[row]
    is_lost = trajectory.stop_reason.is_infrastructure_failure
    measured = None if is_lost else _measured(policy.rollout, row, trajectory)
    return {
        "dataset": batch.dataset,
        "sample": sample,
        "prompt": decode(policy.setup.tokenizer, trajectory.prompt_ids),
        **row_of(question, trajectory),
        **measure(question, trajectory, measured, policy.rollout.answers),
        "environment": json.dumps(measured) if measured else None,
    }


def _measured(rollout: PolicyRollout, row: int, trajectory: Trajectory) -> dict[str, float]:
    """The measures of the environment or agent, with the sum of turn rewards, if any."""
    rewards = [turn.reward for turn in trajectory.turns if turn.reward is not None]
    measures = {**rollout.measures(row), **({"reward": sum(rewards)} if rewards else {})}
    return {name: float(value) for name, value in measures.items() if value is not None}


def measure(
    question: Question,
    trajectory: Trajectory,
    measured: Mapping[str, float] | None = None,
    answers: bool = True,
) -> dict[str, float | None]:
    """Compute every measure of `MEASURES`, with `None` for those that do not apply.

    Those are choice accuracy for an open question, scores of answers without a golden answer, and everything after an
    infrastructure failure, which carries no information about the policy. Scores and searches do not apply either if
    the environment or agent has `measured` whether its task is `solved` (reported as `correct`), or if the rollout has
    no `answers` in tags.
    """
    if trajectory.stop_reason.is_infrastructure_failure:
        return dict.fromkeys(MEASURES)
    statistics = rollout_statistics([trajectory])
    outcome = _scores(question, trajectory) | {"searches": statistics["searches_per_trajectory"]}
    solved = (measured or {}).get("solved")
    if solved is not None or not answers:
        outcome = dict.fromkeys(outcome) | {"correct": solved}
    return {
        **outcome,
        "turns": statistics["turns_per_trajectory"],
        "invalid_actions": statistics["invalid_actions_per_trajectory"],
        "neutralized": statistics["neutralized_per_trajectory"],
        "generated_tokens": float(sum(len(turn.token_ids) for turn in trajectory.turns)),
        "observation_tokens": float(sum(len(seen.token_ids) for seen in trajectory.observations)),
    }


def _scores(question: Question, trajectory: Trajectory) -> dict[str, float | None]:
    golden, options = question.golden_answers, question.options
    if not golden:
        return dict.fromkeys(SCORES)
    return {
        "correct": qa.score_answer(trajectory, golden, options),
        "exact_match": qa.exact_match(trajectory.answer, golden),
        "f1": qa.token_f1(trajectory.answer, golden),
        "sub_exact_match": qa.sub_exact_match(trajectory.answer, golden),
        "choice_accuracy": qa.score_choice(trajectory, golden, options) if options else None,
    }
