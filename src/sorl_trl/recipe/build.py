"""Builds what the arguments describe: questions, rollout, trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, ProgressCallback
from trl import get_peft_config, get_quantization_config

from sorl_trl import qa
from sorl_trl.command_line import UserMistake, check_checkpoint, mistakes
from sorl_trl.diagnostics import CollapseGuard, TurnProgressCallback
from sorl_trl.evaluation.agents import prompt_rows
from sorl_trl.methods import method_from
from sorl_trl.recipe.arguments import INFORMATION_GAIN, REWARDS, Arguments
from sorl_trl.rollout import ChatProtocol, Collector, EnvironmentResponder
from sorl_trl.rollout.environments.bfcl import (
    BFCL_BENCHMARKS,
    BFCLEnvironment,
    are_tasks,
    bfcl_questions,
    check_given,
    most_messages,
    names_tasks,
)
from sorl_trl.search import NoSearch
from sorl_trl.trainers import AgentRollout, SearchRollout
from sorl_trl.trainers.base import TurnLevelTrainer
from sorl_trl.trainers.rewards import InformationGain


def load_prompts(arguments: Arguments, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, Dataset | None]:
    """Load the questions to train on and to evaluate on, as prompts. Downloads happen once per machine.

    Raises ValueError if the arguments do not fit together.
    """
    task = arguments.task
    with arguments.config.main_process_first(desc="loading the questions"):
        train = _load_questions(task.train_questions, "train")
        evaluation = _load_questions(str(task.eval_questions), None) if arguments.is_evaluated else None
    evaluation = evaluation and _spread(evaluation, task.eval_limit)
    check_questions_fit(arguments, [*train, *(evaluation or ())])
    rows = partial(prompt_rows, rollout=arguments.rollout, tokenizer=tokenizer)
    prompts = Dataset.from_list(rows(train))
    prompts.info.dataset_name = Path(task.train_questions).name  # for the model card
    return prompts, evaluation and Dataset.from_list(rows(evaluation))


def _load_questions(source: str, split: str | None) -> list[qa.Question]:
    if source in BFCL_BENCHMARKS:
        return bfcl_questions(source)
    return qa.load_benchmark(source, split) if source in qa.BENCHMARKS else qa.load_questions(source)


def _spread(questions: Sequence[qa.Question], limit: int | None) -> list[qa.Question]:
    """At most `limit` questions, evenly spaced, because the first ones of a joined set may all be from one source."""
    count = min(limit or len(questions), len(questions))
    return [questions[place * len(questions) // count] for place in range(count)]


def check_questions_fit(arguments: Arguments, questions: Sequence[qa.Question]) -> None:
    """Raise ValueError for rewards or other arguments that do not apply to questions, or else to tasks."""
    of_tasks = are_tasks(questions)
    allowed = [name for name in REWARDS if (name in qa.TASK_REWARDS) == of_tasks]
    if wrong := [name for name in arguments.task.rewards if name not in allowed]:
        kind = "tasks" if of_tasks else "questions"
        raise ValueError(f"`rewards` has {wrong[0]!r}, but `train_questions` holds {kind}, with {', '.join(allowed)}.")
    without = [question.id for question in questions if not question.options]
    if without and "choice" in arguments.task.rewards:
        raise ValueError(
            f"`rewards` has 'choice', but {len(without)} of {len(questions)} questions have no options, the first is "
            f"{without[0]!r}; 'answer' is for both kinds."
        )
    if of_tasks:
        check_given(arguments.given)


def build_rollout(arguments: Arguments, tokenizer: PreTrainedTokenizerBase) -> AgentRollout:
    """Check protocol and limits against the tokenizer, then open the search engine, which may index a corpus."""
    config = arguments.config
    limits = arguments.rollout.limits(config.max_completion_length)
    source = arguments.task.train_questions
    if names_tasks(source):
        if "max_turns" not in arguments.given:
            limits = replace(limits, max_turns=most_messages(_load_questions(source, None)))
        responder = EnvironmentResponder(partial(BFCLEnvironment, arguments.rollout.is_terse))
        return AgentRollout(responder, ChatProtocol(), limits, arguments.engine)
    protocol = arguments.rollout.tag_protocol(tokenizer, config.chat_template_kwargs)
    Collector(tokenizer, NoSearch(), protocol, limits)
    with config.main_process_first(desc="opening the search engine"):
        search = arguments.search.build_search().backend
    return SearchRollout(search, protocol, limits, engine=arguments.engine)


def reward_functions(names: Sequence[str]) -> list[Any]:
    """The functions or objects that TRL calls for rewards, by their names in a recipe."""
    return [InformationGain() if name == INFORMATION_GAIN else qa.REWARDS[name] for name in names]


def load_tokenizer(arguments: Arguments) -> PreTrainedTokenizerBase:
    """Load the policy's tokenizer. Raises UserMistake if there is none, or it lacks a chat template that it needs."""
    model, config = arguments.model, arguments.config
    if model.model_name_or_path is None:
        raise UserMistake("`model_name_or_path` is missing: name a checkpoint's folder or a Hub id")
    check_checkpoint(model.model_name_or_path)
    with mistakes(f"`model_name_or_path` is {model.model_name_or_path!r}, which cannot be loaded"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model.model_name_or_path, revision=model.model_revision, trust_remote_code=config.trust_remote_code
        )
    with mistakes():
        arguments.rollout.check_template(tokenizer, names_tasks(arguments.task.train_questions))
    return tokenizer


def build_trainer(arguments: Arguments, rollout: AgentRollout | None = None) -> TurnLevelTrainer:
    """Build the trainer that a recipe and a command line describe, with its model, data, rollout and callbacks.

    `rollout` is the result of `build_rollout`, if it was called before.

    Raises:
        UserMistake: Something that the arguments name is missing or cannot be loaded.
    """
    task, config, model = arguments.task, arguments.config, arguments.model
    tokenizer = load_tokenizer(arguments)
    config.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(config.model_init_kwargs or {}),
    }
    train_dataset, eval_dataset = load_prompts(arguments, tokenizer)
    method = arguments.trainer.method
    trainer = arguments.trainer_class(
        model=model.model_name_or_path,
        reward_funcs=reward_functions(task.rewards),
        args=config,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
        rollout_func=rollout or build_rollout(arguments, tokenizer),
        **({} if method is None else {"method": method_from(method)}),  # its options are already in the config
    )
    if task.collapse_guard != "off":
        trainer.add_callback(CollapseGuard(task.collapse_guard))
    if not config.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(TurnProgressCallback)
    return trainer
