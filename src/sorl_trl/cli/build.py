"""Builds the trainer that the arguments describe, with its questions."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import Parameter, signature
from pathlib import Path

from datasets import Dataset
from trl import get_peft_config, get_quantization_config
from trl.data_utils import is_conversational

from sorl_trl import qa
from sorl_trl.cli.arguments import AGENT_REWARD, Arguments, reward_function
from sorl_trl.diagnostics.callbacks import CollapseGuard
from sorl_trl.rollout.policy_rollout import ADDED_COLUMNS
from sorl_trl.rollout.tasks import check_read, load_rows
from sorl_trl.trainers.base import TurnLevelTrainer
from sorl_trl.trainers.rewards import check_needed


def load_prompts(arguments: Arguments) -> tuple[Dataset, Dataset | None]:
    """Load the prompts for training and evaluation.

    Raises ValueError if the arguments are inconsistent.
    """
    task, rollout = arguments.task, arguments.rollout
    train = load_rows(task.train_questions, rollout)
    evaluation = load_rows(str(task.eval_questions), rollout) if arguments.is_evaluated else None
    evaluation = evaluation and _spread(evaluation, task.eval_limit)
    questions = [*train, *(evaluation or ())]
    check_read(rollout, questions, arguments.given)
    check_rewards(arguments, questions)
    prompts = Dataset.from_list(arguments.parts.rows(train))
    for name in task.rewards:
        check_needed(reward_function(name), name, [*prompts.column_names, *ADDED_COLUMNS])
    prompts.info.dataset_name = Path(task.train_questions).name  # for the model card
    return prompts, evaluation and Dataset.from_list(arguments.parts.rows(evaluation))


def _spread(questions: Sequence[qa.Question], limit: int | None) -> list[qa.Question]:
    """At most `limit` questions, evenly spaced, because the first ones of a joined set may share a source."""
    count = min(limit or len(questions), len(questions))
    return [questions[place * len(questions) // count] for place in range(count)]


def check_rewards(arguments: Arguments, questions: Sequence[qa.Question]) -> None:
    """Raise ValueError for rewards that the actor cannot give, or that need answers or options that rows lack."""
    rollout = arguments.rollout
    for name in arguments.task.rewards:
        if rollout.searches and name in qa.TASK_REWARDS:
            raise ValueError(f"`rewards` has {name!r}, which an environment gives: set `environment`.")
        if name == AGENT_REWARD and not rollout.has_agent:
            raise ValueError(f"`rewards` has {name!r}, which is what an agent returns: set `agent`.")
        if rollout.has_agent and name in qa.REWARDS:
            raise ValueError(
                f"`rewards` has {name!r}, which reads actions in tags, but an agent's turns are messages: use "
                f"{AGENT_REWARD!r}, which is what your agent returns, or your own function."
            )
        parameters = signature(reward_function(name)).parameters.values()
        required = {each.name for each in parameters if each.default is Parameter.empty}
        for column in ("golden_answers", "options"):
            without = [each.id for each in questions if column in required and not getattr(each, column)]
            if without:
                raise ValueError(
                    f"`rewards` has {name!r}, but {len(without)} of {len(questions)} questions have no {column}, "
                    f"first {without[0]!r}."
                )


def build_trainer(arguments: Arguments) -> TurnLevelTrainer:
    """Build the trainer that a recipe and a command line describe, with its model, data, rollout and callbacks.

    Raises:
        UserMistake, ValueError: Something named in the arguments is missing, does not fit, or cannot be loaded.
    """
    task, config, model, parts = arguments.task, arguments.config, arguments.model, arguments.parts
    config.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(config.model_init_kwargs or {}),
    }
    train_dataset, eval_dataset = load_prompts(arguments)
    parts.check(is_conversational(train_dataset[0]))
    with config.main_process_first(desc="opening the search engine"):
        rollout = parts.rollout_func
    trainer = arguments.trainer_class(
        model=model.model_name_or_path,
        reward_funcs=[reward_function(name) for name in task.rewards],
        args=config,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=parts.tokenizer,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
        rollout_func=rollout,
        method=arguments.trainer.method,
    )
    if task.collapse_guard != "off":
        trainer.add_callback(CollapseGuard(task.collapse_guard))
    return trainer
