from __future__ import annotations

from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from sorl_trl.evaluation.agents import Agent
from sorl_trl.evaluation.batches import run_batches
from sorl_trl.evaluation.plan import plan_batches
from sorl_trl.qa import Question
from sorl_trl.records.evaluated import EvaluatedTrajectory
from sorl_trl.rollout import Collector, RolloutArguments
from sorl_trl.rollout.tasks import prompt_rows
from sorl_trl.sandbox import CORPUS_FILE, PROTOCOL, WarmStartConfig, World, train_tokenizer
from sorl_trl.sandbox.world import Relation
from sorl_trl.search import BM25Index

HOME = Relation("home", "person", "city", "hometown", "{subject} was born in {object} .", "born")
RIVER = Relation("river", "city", "river", "water", "{subject} drinks from {object} .", "drinks")
QUESTION = Question(
    "q",
    "what is the water of the hometown of Ann Lee ?",
    ("Blue Nile",),
    {"relations": ["home", "river"], "subject": "Ann Lee"},
)
PROMPT = "question : what is the water of the hometown of ann lee ?"


def run_expert(
    world: World, config: WarmStartConfig, directory: Path, tokenizer: PreTrainedTokenizerBase | None = None
) -> list[EvaluatedTrajectory]:
    """The expert on the train questions of a world, with the real search engine and collector."""
    tokenizer = tokenizer or train_tokenizer([world], config.texts())
    index = BM25Index.build(world.write(directory) / CORPUS_FILE, directory / "index", show_progress=False)
    collector = Collector(tokenizer, index, PROTOCOL, config.limits)
    asked = RolloutArguments(prompt_template=config.prompt_template, chat=config.chat)
    rows = partial(prompt_rows, rollout=asked, tokenizer=tokenizer)
    agent = Agent(collector, config.expert(tokenizer, world), rows)
    batches = plan_batches({world.name: world.train}, num_samples=1, batch_size=4000)
    return [row for _, rows in run_batches(batches, agent, seed=0) for row in rows]


def mean(rows: list[EvaluatedTrajectory], measure: str, hops: int | None = None) -> float:
    """Over all rows, or over those whose questions take so many searches."""
    values = [float(row.measures[measure] or 0) for row in rows if hops in (None, row.question.metadata["hops"])]
    return sum(values) / len(values)
