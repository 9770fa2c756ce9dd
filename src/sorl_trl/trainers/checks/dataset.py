"""What a training set must have for a run to make sense; each raises ValueError before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from datasets import Dataset, IterableDataset
from trl import GRPOConfig
from trl.data_utils import is_conversational

from sorl_trl.checks import Problem, raise_first
from sorl_trl.trainers.base_config import TurnLevelConfig
from sorl_trl.trainers.turns.information_gain import first_answer
from sorl_trl.trainers.turns.rewards import TURN_IDS


def dataset_size_problems(argument: str, prompts: int, config: GRPOConfig) -> Iterator[Problem]:
    """TRL leaves out what does not fill a rollout: with too few prompts it would stop before the first step.

    Args:
        argument: what gives the prompts.
        prompts: how many it gives.
        config: the trainer's.
    """
    size, group = int(config.generation_batch_size or 0), int(config.num_generations or 1)
    if prompts < size // group:
        yield Problem(
            argument,
            f"`{argument}` has {prompts} prompts, but a rollout takes {size // group}: `generation_batch_size` {size} "
            f"/ `num_generations` {group}. Give more prompts, or change these.",
        )


def check_dataset_size(dataset: Any, config: GRPOConfig) -> None:
    if isinstance(dataset, Dataset):
        raise_first(dataset_size_problems("train_dataset", len(dataset), config))


def check_column_names(train_dataset: Any, eval_dataset: Any, args: GRPOConfig) -> None:
    """Reward functions are given the turns as `turn_ids`: a column of that name would be lost."""
    if args.remove_unused_columns:  # TRL leaves the column out
        return
    for argument, row in _first_rows(train_dataset, eval_dataset):
        if TURN_IDS in row:
            raise ValueError(
                f"`{argument}` has a column {TURN_IDS!r}, but under that name reward functions are given the turn of "
                f"each token. Give it another name: `dataset.rename_column({TURN_IDS!r}, ...)`."
            )


def check_answer_column(train_dataset: Any, eval_dataset: Any, args: TurnLevelConfig) -> None:
    """Information gain scores the golden answers: without them the first rollout would fail."""
    if args.information_gain_coef:
        for argument, row in _first_rows(train_dataset, eval_dataset):
            raise_first(answer_column_problems(argument, row, args))


def answer_column_problems(argument: str, row: Mapping[str, Any], args: TurnLevelConfig) -> Iterator[Problem]:
    """Whether a row, the first that `argument` gives, has the answer that information gain scores."""
    column = args.information_gain_column
    if row and column not in row:
        yield Problem(
            "information_gain_column",
            f"`{argument}` has no column {column!r}, but `information_gain_coef` is {args.information_gain_coef}: "
            f"it scores the golden answers there. Its columns are {sorted(row)}; name the right one as "
            "`information_gain_column`, or set `information_gain_coef=0`.",
            "golden_answers",
        )
        return
    try:
        first_answer(row.get(column), column)
    except ValueError as error:
        yield Problem("information_gain_column", str(error), "golden_answers")


def _first_rows(train_dataset: Any, eval_dataset: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name of each data set, and its first row, which is empty where there is none."""
    several = eval_dataset if isinstance(eval_dataset, Mapping) else {None: eval_dataset}
    evaluated = {"eval_dataset" if name is None else f"eval_dataset[{name!r}]": of for name, of in several.items()}
    for argument, dataset in {"train_dataset": train_dataset, **evaluated}.items():
        if isinstance(dataset, (Dataset, IterableDataset)):
            yield argument, next(iter(dataset), {})


def check_chat_template(dataset: Any, processing_class: Any) -> None:
    """Without a template, conversational prompts would fail in the first rollout."""
    example: dict[str, Any] = next(iter(dataset), {})
    if is_conversational(example) and not getattr(processing_class, "chat_template", None):
        raise ValueError(
            "The prompts of `train_dataset` are conversational, but the tokenizer has no chat template. Set "
            "`tokenizer.chat_template`, or use plain-text prompts."
        )
