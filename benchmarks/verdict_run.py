"""One run of the verdict: prepare a warm start and its questions, train, ask the policy, record."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from examples.quickstart import CORPUS_FILE, EVALUATION_FILE, PROTOCOL, TRAIN_FILE, WarmStartConfig, warm_start
from examples.quickstart.demo import PRETRAINED, build_worlds
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import SAFE_WEIGHTS_NAME

from benchmarks.common import MIXED, QUIET, Row
from benchmarks.stability_plan import BenchmarkMethod
from benchmarks.stability_run import Job, Rates, callback_of, summarize_rollouts, train
from sorl_trl import SearchRollout, SOGRPOConfig, SOGRPOTrainer, SOPPOConfig, SOPPOTrainer, qa
from sorl_trl.command_line import UserMistake
from sorl_trl.evaluation.policy import generation_config, message_ends
from sorl_trl.files import write_whole
from sorl_trl.qa import Question
from sorl_trl.rollout import EngineOptions, TurnEnd, model_engine
from sorl_trl.rollout.chat import RolloutSetup
from sorl_trl.search import BM25Index

GROUP, EPOCHS, ROLLOUTS = 8, 2, 5
"""Trajectories of a prompt, how often each is trained on, and rollouts of a run."""
TRIES = 8
"""Of each candidate: a question that is answered in some, but not all, is trained on."""
QUESTIONS = 300
"""Of the world, to judge with."""
BATCH = 100
"""Questions that are asked at once."""
INDEX, WARM_START = "index", "warm-start"
FIXED: Row = {
    **{"num_generations": GROUP, "num_iterations": EPOCHS, "lr_scheduler_type": "constant"},
    **{"gradient_checkpointing": False, "logging_steps": 1, "log_turn_details": True, **QUIET, "bf16": True},
}
"""Fields of every trainer's config."""
CRITICS: dict[str, Row] = {
    "so_ppo_slow": {"value_head_learning_rate": 0.02},
    "so_ppo_fast": {"value_head_learning_rate": 0.3},
    "so_ppo_model": {"critic": "model"},
}
"""More of them, of arms whose critic is not the default."""
CURVES = {
    **{"reward": "reward", "clipped": "clip_ratio/region_mean", "kl": "kl_to_old", "kl_max": "kl_to_old max"},
    **{"entropy": "entropy", "explained": "critic/explained_variance"},
}
"""What a row has of each rollout -> the metric, a mean over its updates."""


@dataclass(frozen=True)
class Column:
    """A way to train, the same for all arms. Columns with turns of one length share warm start and questions."""

    title: str
    turns: str
    """The folder of what they share."""
    warm_start: WarmStartConfig
    trajectories: int
    """Per rollout."""
    candidates: int
    """Questions that the warm start is asked, to find those from which it can learn."""
    sampled: int
    """Questions that judge a policy by sampled answers; the first third also by greedy ones."""
    updates: int = 16
    """Per rollout."""
    times: int = 1
    """How many times the rate of an arm: that of the recipe, or what the search chose."""


class Asked:
    """The world of a column, and how its policies are asked."""

    def __init__(self, column: Column, runs: Path) -> None:
        self.column, self.folder = column, runs / column.turns
        self.limits = column.warm_start.limits
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.folder / WARM_START)
        index = BM25Index.load(self.folder / INDEX)
        engine = EngineOptions(rejoin_after=0, kv_cache_gib=1.5)  # searches take no time; a batch has room
        self.rollout = SearchRollout(index, PROTOCOL, self.limits, engine=engine)

    def rows(self, questions: Sequence[Question]) -> list[Row]:
        return qa.build_prompt_rows(questions, self.column.warm_start.prompt_template, self.column.warm_start.chat)

    def right(self, model: Any, questions: Sequence[Question], temperature: float) -> list[float]:
        """The exact match, 0 or 1, of each answer, with the same random numbers for every policy."""
        ends = message_ends(model, self.tokenizer)
        setup = RolloutSetup(self.tokenizer, None, {}, ends, self.limits)
        end = TurnEnd(self.tokenizer, self.rollout.stop_strings, ends)
        engine = model_engine(model.eval(), end, generation_config(temperature), self.rollout.engine)
        scores = []
        with torch.random.fork_rng(), torch.no_grad(), MIXED:
            for start in range(0, len(questions), BATCH):
                torch.manual_seed(start)
                asked = questions[start : start + BATCH]
                rows = self.rows(asked)
                made, _ = self.rollout.collect(setup, [row["prompt"] for row in rows], rows, engine)
                scores += [qa.exact_match(a.answer, q.golden_answers) for a, q in zip(made, asked, strict=True)]
        return scores

    def judge(self, model: Any) -> Row:
        """The score on questions that nobody trains on, by hops, and that of greedy answers."""
        questions = qa.load_questions(self.folder / EVALUATION_FILE)[: self.column.sampled]
        sampled = self.right(model, questions, 1.0)
        greedy = self.right(model, questions[: len(questions) // 3], 0.0)
        pairs = [(each.metadata["hops"], score) for each, score in zip(questions, sampled, strict=True)]
        by_hops = [round(fmean(score for hops, score in pairs if hops == number), 4) for number in (1, 2)]
        return {"sampled": round(fmean(sampled), 4), "by_hops": by_hops, "greedy": round(fmean(greedy), 4)}


def prepare(column: Column, model: str, runs: Path, known: Row) -> Row:
    """Make world, warm start and training questions; what the runs of all columns with such turns share.

    What is `known` of them from elsewhere is taken over. Raises UserMistake if this machine makes another warm start.
    """
    torch.set_num_threads(1)
    folder = runs / column.turns
    if not (folder / WARM_START).is_dir():
        world, practice = build_worlds(0, replace(PRETRAINED, questions=QUESTIONS))
        BM25Index.build(world.write(folder) / CORPUS_FILE, folder / INDEX, show_progress=False)
        warm_start(world, practice, folder, column.warm_start, model).rename(folder / WARM_START)
    digest = hashlib.sha256((folder / WARM_START / SAFE_WEIGHTS_NAME).read_bytes()).hexdigest()[:12]
    if known.get("warm_start", digest) != digest:
        raise UserMistake(
            f"{folder} has not the warm start {known['warm_start']} of the other runs: bring their folder."
        )
    return known or _learnable(Asked(column, runs), digest)


def _learnable(asked: Asked, digest: str) -> Row:
    """Ask the warm start: which candidates it answers now and then, and how well it does on other questions."""
    model = AutoModelForCausalLM.from_pretrained(asked.folder / WARM_START, dtype=torch.float32)
    candidates = qa.load_questions(asked.folder / TRAIN_FILE)[: asked.column.candidates]
    tries = [question for question in candidates for _ in range(TRIES)]
    right = asked.right(model, tries, 1.0)
    counts = [sum(right[start : start + TRIES]) for start in range(0, len(right), TRIES)]
    questions = [question.id for question, count in zip(candidates, counts, strict=True) if 0 < count < TRIES]
    return {"warm_start": digest, "start": asked.judge(model), "questions": questions}


def build_trainer(
    job: Job, arm: BenchmarkMethod, asked: Asked, prepared: Row, rates: Sequence[float], output: Path
) -> Any:
    """The trainer of a job, which takes these learning rates, if there are any, update for update."""
    has_critic, column = arm.method.needs_critic, asked.column
    trainer_class: Any = SOPPOTrainer if has_critic else SOGRPOTrainer
    config_class: Any = SOPPOConfig if has_critic else SOGRPOConfig
    config = config_class(
        str(output),
        per_device_train_batch_size=column.trajectories * EPOCHS // column.updates,
        steps_per_generation=column.updates // EPOCHS,
        max_steps=ROLLOUTS * column.updates,
        max_completion_length=asked.limits.max_trajectory_tokens,
        learning_rate=job.rate,
        seed=job.seed,
        **FIXED,
        **CRITICS.get(job.arm, {}),
    )
    questions = qa.load_questions(asked.folder / TRAIN_FILE)
    return trainer_class(
        model=str(asked.folder / WARM_START),
        reward_funcs=qa.exact_match_reward,
        args=config,
        train_dataset=Dataset.from_list(asked.rows([each for each in questions if each.id in prepared["questions"]])),
        processing_class=asked.tokenizer,
        rollout_func=asked.rollout,
        method=arm.method,
        callbacks=[Rates(rates)],
    )


def run(job: Job, column: Column, arm: BenchmarkMethod, runs: Path, prepared: Row, rates: Sequence[float]) -> Row:
    """Train, judge, and make the row. A run whose weights become NaN has an `error` and scores 0."""
    torch.set_num_threads(1)
    output = runs / job.name
    output.mkdir(parents=True, exist_ok=True)
    started = time.process_time()
    with (output / "log.txt").open("w") as log, redirect_stdout(log), redirect_stderr(log):
        asked = Asked(column, runs)
        trainer = build_trainer(job, arm, asked, prepared, rates, output)
        error = train(trainer)
        trained = time.process_time()
        judged = {"sampled": 0.0, "by_hops": [0.0, 0.0], "greedy": 0.0} if error else asked.judge(trainer.model)
    updates = [entry for entry in trainer.state.log_history if "loss" in entry]
    write_whole(output / "updates.jsonl", "".join(json.dumps(entry) + "\n" for entry in updates).encode())
    rollouts = summarize_rollouts(updates, column.updates)
    return {
        **{**vars(job), **judged, "error": error},
        **{"start": prepared["start"], "warm_start": prepared["warm_start"]},
        "seconds": [round(trained - started), round(time.process_time() - trained)],
        **{name: [each.get(metric) for each in rollouts] for name, metric in CURVES.items()},
        "rates": callback_of(trainer, Rates).taken,
    }
