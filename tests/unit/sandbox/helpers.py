from __future__ import annotations

from pathlib import Path

from sorl_trl.evaluation import EvaluationResult, encode_prompts, evaluate
from sorl_trl.qa import build_prompt_rows
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


def run_expert(world: World, noise: ExpertNoise, directory: Path) -> EvaluationResult:
    """The expert on all questions of a world, with the real search engine and collector."""
    tokenizer = train_tokenizer([world])
    index = BM25Index.build(world.write(directory) / CORPUS_FILE, directory / "index", show_progress=False)
    questions = (*world.train, *world.evaluation)
    expert = ScriptedExpert(tokenizer, world.relations, questions, noise, seed=0)
    prompts = encode_prompts(tokenizer, build_prompt_rows(questions, PROMPT_TEMPLATE))
    return evaluate(Collector(tokenizer, index, PROTOCOL, LIMITS), expert, questions, prompts, batch_size=4000)
