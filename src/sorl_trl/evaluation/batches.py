"""Makes the batches of a run, and keeps each as soon as it is finished."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from sorl_trl.evaluation.measures import measure
from sorl_trl.evaluation.plan import Batch
from sorl_trl.evaluation.prompts import encode_prompts
from sorl_trl.evaluation.run_folder import Outcome, RunFolder
from sorl_trl.qa import build_prompt_rows
from sorl_trl.records.evaluated import EvaluatedTrajectory
from sorl_trl.rollout import Collector, Engine, Generator
from sorl_trl.rollout.tokens import decode
from sorl_trl.search import SearchUnavailable

LOST_BATCHES = 3
"""After so many in a row in which every trajectory was masked, a run stops: the search engine is down."""


@dataclass(frozen=True)
class Agent:
    """A policy with everything that is needed to ask it questions."""

    tokenizer: PreTrainedTokenizerBase
    collector: Collector
    generator: Generator | Engine
    prompt_template: str
    conversational: bool


def run_batches(
    batches: Iterable[Batch], agent: Agent, seed: int
) -> Iterator[tuple[Batch, list[EvaluatedTrajectory]]]:
    """Yield each batch with its trajectories, as soon as they are finished.

    Torch is seeded anew for each batch: what a batch samples does not depend on the batches before it.
    """
    for batch in batches:
        rows = build_prompt_rows(
            [sample.question for sample in batch.samples], agent.prompt_template, agent.conversational
        )
        prompts = encode_prompts(agent.tokenizer, rows)
        torch.manual_seed(batch.seed(seed))
        trajectories = agent.collector.collect(prompts, agent.generator)
        yield (
            batch,
            [
                EvaluatedTrajectory(
                    dataset=batch.dataset,
                    question=sample.question,
                    sample=sample.index,
                    prompt=decode(agent.tokenizer, trajectory.prompt_ids),
                    trajectory=trajectory,
                    measures=measure(sample.question, trajectory),
                )
                for sample, trajectory in zip(batch.samples, trajectories, strict=True)
            ],
        )


def complete(
    run: RunFolder, batches: Sequence[Batch], load_agent: Callable[[], Agent], seed: int, show_progress: bool = True
) -> None:
    """Make the batches that `run` does not have yet, with a progress bar that shows the score so far.

    A batch in which an infrastructure failure ended a trajectory is made anew: perhaps the engine works now.

    Args:
        run: Where finished batches are, and go.
        batches: All that this process has to see to.
        load_agent: Loads the policy; not called if nothing is left to do.
        seed: Of the run.
        show_progress: Show the bar on stderr.

    Raises:
        SearchUnavailable: The search engine spoilt `LOST_BATCHES` batches in a row altogether.
    """
    kept = [run.batch_outcomes(batch) for batch in batches]
    is_done = [bool(outcomes) and not any(each.is_masked for each in outcomes) for outcomes in kept]
    todo = [batch for batch, done in zip(batches, is_done, strict=True) if not done]
    agent = load_agent() if todo else None
    with _Progress(batches, show_progress) as progress:
        for batch, outcomes, done in zip(batches, kept, is_done, strict=True):
            if done:
                progress.show(batch, outcomes)
        if agent is None:
            return
        lost = 0
        for batch, rows in run_batches(todo, agent, seed):
            run.write(batch, rows)
            outcomes = run.batch_outcomes(batch)
            progress.show(batch, outcomes)
            lost = lost + 1 if all(outcome.is_masked for outcome in outcomes) else 0
            if lost == LOST_BATCHES:
                raise SearchUnavailable(
                    f"the search engine was down in {lost} batches in a row: start it, then the same command goes on"
                )


@dataclass
class _Progress:
    """A bar over trajectories, and beside it the mean score of the dataset at hand."""

    batches: Sequence[Batch]
    enabled: bool
    scores: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __enter__(self) -> _Progress:
        total = sum(len(batch.samples) for batch in self.batches)
        self.bar = tqdm(total=total, desc="Evaluating", unit="trajectory", disable=not self.enabled)
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def show(self, batch: Batch, outcomes: Sequence[Outcome]) -> None:
        """Count a finished batch in."""
        scores = self.scores[batch.dataset]
        scores += [score for outcome in outcomes if (score := outcome.measures["correct"]) is not None]
        if scores:
            # `correct` of a question with options is choice accuracy.
            name = "accuracy" if batch.samples[0].question.options else "EM"
            self.bar.set_postfix_str(f"{batch.dataset} {name} {sum(scores) / len(scores):.3f}", refresh=False)
        self.bar.update(len(outcomes))
