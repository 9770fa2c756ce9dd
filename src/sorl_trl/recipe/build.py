"""From arguments to what they describe: questions, rollout, trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, ProgressCallback
from transformers.trainer import TRAINER_STATE_NAME
from trl import get_peft_config, get_quantization_config

from sorl_trl import qa
from sorl_trl.checks import Problem, raise_first
from sorl_trl.command_line import check_checkpoint, mistakes
from sorl_trl.diagnostics import CollapseGuard, TurnProgressCallback
from sorl_trl.recipe.arguments import Arguments
from sorl_trl.rollout import Collector, RolloutArguments
from sorl_trl.search import NoSearch
from sorl_trl.trainers import SearchRollout
from sorl_trl.trainers.base_trainer import TurnLevelTrainer


def load_prompts(arguments: Arguments) -> tuple[Dataset, Dataset | None]:
    """The questions to train on and those to evaluate on, as prompts. What is downloaded is so once per machine."""
    task = arguments.task
    with arguments.config.main_process_first(desc="loading the questions"):
        train = _load_questions(task.train_questions, "train")
        evaluation = None if task.eval_questions is None else _load_questions(task.eval_questions, None)
    for questions in (train, evaluation or ()):
        raise_first(choice_problems(task.rewards, questions))
    return _as_prompts(train, arguments.rollout), evaluation and _as_prompts(evaluation, arguments.rollout)


def _load_questions(source: str, split: str | None) -> list[qa.Question]:
    return qa.load_benchmark(source, split) if source in qa.BENCHMARKS else qa.load_questions(source)


def _as_prompts(questions: Sequence[qa.Question], rollout: RolloutArguments) -> Dataset:
    return Dataset.from_list(qa.build_prompt_rows(questions, rollout.prompt_template, rollout.chat))


def build_rollout(arguments: Arguments, tokenizer: PreTrainedTokenizerBase) -> SearchRollout:
    """Protocol and limits are checked against the tokenizer before a large corpus is indexed."""
    config = arguments.config
    protocol = arguments.rollout.tag_protocol(tokenizer, config.chat_template_kwargs)
    limits = arguments.rollout.limits(config.max_completion_length)
    Collector(tokenizer, NoSearch(), protocol, limits)
    with config.main_process_first(desc="opening the search engine"):
        search = arguments.search.build_search().backend
    return SearchRollout(search, protocol, limits, engine=arguments.engine)


def choice_problems(rewards: Sequence[str], questions: Sequence[qa.Question]) -> Iterator[Problem]:
    """Whether 'choice' has something to choose from."""
    without = [question for question in questions if not question.options]
    if "choice" in rewards and without:
        what = f"`rewards` has 'choice', but {len(without)} of {len(questions)} questions have no options, the first "
        what += f"is {without[0].id!r}; 'answer' is for both kinds."
        yield Problem("rewards", what, ["answer" if name == "choice" else name for name in rewards])


def resume_problems(checkpoint: str | None) -> Iterator[Problem]:
    """Whether there is a checkpoint to go on from."""
    if checkpoint is None or (Path(checkpoint) / TRAINER_STATE_NAME).is_file():
        return
    missing = f"it holds no {TRAINER_STATE_NAME}" if Path(checkpoint).is_dir() else "there is no such folder"
    what = f"`resume_from_checkpoint` is {checkpoint!r}, but must be the folder of a checkpoint: {missing}."
    yield Problem("resume_from_checkpoint", what)


def build_trainer(arguments: Arguments) -> TurnLevelTrainer:
    """Build the trainer that a recipe and a command line describe, with its model, data, rollout and callbacks.

    Raises:
        UserMistake: something that the arguments name is missing or cannot be loaded.
    """
    task, config, model = arguments.task, arguments.config, arguments.model
    raise_first(resume_problems(config.resume_from_checkpoint))
    check_checkpoint(str(model.model_name_or_path))
    with mistakes(f"`model_name_or_path` is {model.model_name_or_path!r}, which cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(
            model.model_name_or_path, revision=model.model_revision, trust_remote_code=config.trust_remote_code
        )
    config.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(config.model_init_kwargs or {}),
    }
    train_dataset, eval_dataset = load_prompts(arguments)
    trainer = arguments.trainer_class(
        model=model.model_name_or_path,
        reward_funcs=[qa.REWARDS[name] for name in task.rewards],
        args=config,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
        rollout_func=build_rollout(arguments, tokenizer),
    )
    if task.collapse_guard != "off":
        trainer.add_callback(CollapseGuard(task.collapse_guard, trainer))
    if not config.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(TurnProgressCallback)
    return trainer
