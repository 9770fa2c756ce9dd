"""Runs the batches of an evaluation, and saves each as soon as it is finished."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from tqdm.auto import tqdm

from sorl_trl import qa
from sorl_trl.evaluation.agents import Agent
from sorl_trl.evaluation.plan import Batch
from sorl_trl.evaluation.run_folder import RunFolder
from sorl_trl.records.evaluated import MEASURES, EvaluatedTrajectory, write_evaluated
from sorl_trl.rollout import rollout_statistics
from sorl_trl.rollout.trajectories import decode
from sorl_trl.search import SearchUnavailable
from sorl_trl.types import Trajectory

LOST_BATCHES = 3
"""A run stops after so many batches in a row with every trajectory masked, because the engine is down."""


def measure(
    question: qa.Question, trajectory: Trajectory, environment: Mapping[str, float] | None = None
) -> dict[str, float | None]:
    """Compute every measure of `MEASURES`, with `None` for those that do not apply.

    These are choice accuracy for an open question, answers and searches if an `environment` has measured whether its
    task is solved, and everything after an infrastructure failure, which says nothing about the policy.
    """
    if trajectory.stop_reason.is_infrastructure_failure:
        return dict.fromkeys(MEASURES)
    statistics = rollout_statistics([trajectory])
    measures = _scores(question, trajectory) | {"searches": statistics["searches_per_trajectory"]}
    if environment:
        measures = dict.fromkeys(measures) | {"correct": environment["solved"]}
    return {
        **measures,
        "turns": statistics["turns_per_trajectory"],
        "invalid_actions": statistics["invalid_actions_per_trajectory"],
        "neutralized": statistics["neutralized_per_trajectory"],
        "generated_tokens": float(sum(len(turn.token_ids) for turn in trajectory.turns)),
        "observation_tokens": float(sum(len(seen.token_ids) for seen in trajectory.observations)),
    }


def _scores(question: qa.Question, trajectory: Trajectory) -> dict[str, float | None]:
    golden, options = question.golden_answers, question.options
    return {
        "correct": qa.score_answer(trajectory, golden, options),
        "exact_match": qa.exact_match(trajectory.answer, golden),
        "f1": qa.token_f1(trajectory.answer, golden),
        "sub_exact_match": qa.sub_exact_match(trajectory.answer, golden),
        "choice_accuracy": qa.score_choice(trajectory, golden, options) if options else None,
    }


def run_batches(
    batches: Iterable[Batch], agent: Agent, seed: int
) -> Iterator[tuple[Batch, list[EvaluatedTrajectory]]]:
    """Yield each batch with its trajectories, as soon as they are finished.

    Torch is seeded for each batch, so what a batch samples does not depend on the batches before it.
    """
    for batch in batches:
        rows = agent.rows([question for question, _ in batch.samples])
        prompts = qa.encode_prompts(agent.collector.tokenizer, rows, **agent.template_kwargs)
        torch.manual_seed(batch.seed(seed))
        trajectories = agent.collector.collect(prompts, agent.generator, examples=rows)
        yield batch, [_evaluated(batch, agent, row, trajectory) for row, trajectory in enumerate(trajectories)]


def _evaluated(batch: Batch, agent: Agent, row: int, trajectory: Trajectory) -> EvaluatedTrajectory:
    question, sample = batch.samples[row]
    is_masked = trajectory.stop_reason.is_infrastructure_failure
    environment = None if is_masked else agent.collector.responder.measures(row) or None
    return EvaluatedTrajectory(
        dataset=batch.dataset,
        question=question,
        sample=sample,
        prompt=decode(agent.collector.tokenizer, trajectory.prompt_ids),
        trajectory=trajectory,
        measures=measure(question, trajectory, environment),
        environment=environment,
    )


def complete(
    run: RunFolder, batches: Sequence[Batch], load_agent: Callable[[], Agent], seed: int, show_progress: bool = True
) -> None:
    """Run the batches that `run` does not have yet, with a progress bar.

    Batches in which an infrastructure failure ended a trajectory are repeated, because the engine may work now. The
    policy is loaded only if something is left to do. `batches` are all batches of this process.

    Raises:
        SearchUnavailable: Every trajectory of `LOST_BATCHES` batches in a row was masked.
    """
    todo = [batch for batch in batches if not run.has(batch)]
    if not todo:
        return
    total, left = (sum(len(batch.samples) for batch in part) for part in (batches, todo))
    with tqdm(total=total, initial=total - left, desc="Evaluating", disable=not show_progress) as bar:
        lost = 0
        for batch, rows in run_batches(todo, load_agent(), seed):
            write_evaluated(run.shard(batch), rows)
            bar.update(len(rows))
            lost = lost + 1 if all(row.trajectory.stop_reason.is_infrastructure_failure for row in rows) else 0
            if lost == LOST_BATCHES:
                raise SearchUnavailable(
                    f"the search engine or the environment was down in {lost} batches in a row: start it, and the "
                    "same command continues"
                )
