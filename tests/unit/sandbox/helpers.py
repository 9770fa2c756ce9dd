from __future__ import annotations

from pathlib import Path

from sorl_trl.evaluation import Agent, EvaluatedTrajectory, plan_batches, run_batches
from sorl_trl.rollout import Collector
from sorl_trl.sandbox import (
    CORPUS_FILE,
    LIMITS,
    PROMPT_TEMPLATE,
    PROTOCOL,
    ExpertNoise,
    ScriptedExpert,
    World,
    train_tokenizer,
)
from sorl_trl.search import BM25Index


def run_expert(world: World, noise: ExpertNoise, directory: Path) -> list[EvaluatedTrajectory]:
    """The expert on all questions of a world, with the real search engine and collector."""
    tokenizer = train_tokenizer([world])
    index = BM25Index.build(world.write(directory) / CORPUS_FILE, directory / "index", show_progress=False)
    questions = (*world.train, *world.evaluation)
    expert = ScriptedExpert(tokenizer, world.relations, questions, noise, seed=0)
    collector = Collector(tokenizer, index, PROTOCOL, LIMITS)
    agent = Agent(tokenizer, collector, expert, PROMPT_TEMPLATE, conversational=False)
    batches = plan_batches({world.name: questions}, num_samples=1, batch_size=4000)
    return [row for _, rows in run_batches(batches, agent, seed=0) for row in rows]
