"""Train a search agent: `accelerate launch train.py --config recipes/so_grpo.yaml`.

`trainer` says which method trains it. Every field of `TaskArguments`, of `RolloutArguments` and `SearchArguments`, of
that trainer's config (`SOGRPOConfig` or `SOPPOConfig`) and of TRL's `ModelConfig` can stand in the recipe and be
overridden on the command line. `--help` lists them, with `--trainer so_ppo --help` for SO-PPO.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, ProgressCallback
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from sorl_trl import SearchRollout, SOGRPOTrainer, SOPPOTrainer, qa
from sorl_trl.diagnostics import CollapseGuard, TurnProgressCallback
from sorl_trl.diagnostics.collapse_guard import ACTIONS
from sorl_trl.rollout import Collector, RolloutArguments
from sorl_trl.search import NoSearch, SearchArguments
from sorl_trl.search.arguments import override_source
from sorl_trl.trainers.base_config import TurnLevelConfig
from sorl_trl.trainers.base_trainer import TurnLevelTrainer

TRAINERS: dict[str, type[TurnLevelTrainer]] = {"so_grpo": SOGRPOTrainer, "so_ppo": SOPPOTrainer}


@dataclass
class TrainerArguments:
    """Which method trains the agent; the other arguments depend on it."""

    trainer: str = field(
        default="so_grpo",
        metadata={"help": "'so_grpo': advantages from the group. 'so_ppo': advantages from a critic."},
    )

    def __post_init__(self) -> None:
        if self.trainer not in TRAINERS:
            raise ValueError(f"`trainer` is {self.trainer!r}, but must be one of {', '.join(TRAINERS)}.")


@dataclass
class TaskArguments:
    """What the agent is asked, what it is rewarded for, and what to do if it gets worse."""

    train_questions: str = field(
        metadata={
            "help": "JSONL file of questions (`id`, `question`, `golden_answers`, perhaps `options`, `metadata`), or "
            f"a public set by name, of which the training split is taken: {', '.join(qa.BENCHMARKS)}."
        }
    )
    eval_questions: str | None = field(
        default=None,
        metadata={"help": "The same for `eval_strategy`; of a public set its evaluation split is taken."},
    )
    rewards: list[str] = field(
        default_factory=lambda: ["exact_match"],
        metadata={"help": f"Reward functions, summed with `reward_weights`: {', '.join(qa.REWARDS)}."},
    )
    collapse_guard: str = field(
        default="off",
        metadata={
            "help": "What to do when training seems to collapse: 'warn', 'stop', 'lower_lr', 'roll_back' to the last "
            "healthy checkpoint, or 'off'."
        },
    )

    def __post_init__(self) -> None:
        for name in ("train_questions", "eval_questions"):
            value = getattr(self, name)
            if value is not None and value not in qa.BENCHMARKS and not Path(value).is_file():
                raise ValueError(
                    f"`{name}` is {value!r}, but there is no such file, nor a public set of this name "
                    f"({', '.join(qa.BENCHMARKS)})."
                )
        trainable = [name for name, benchmark in qa.BENCHMARKS.items() if "train" in benchmark.sizes]
        if self.train_questions in qa.BENCHMARKS and self.train_questions not in trainable:
            raise ValueError(
                f"`train_questions` is {self.train_questions!r}, which has no training split; "
                f"these have one: {', '.join(trainable)}."
            )
        if self.collapse_guard not in ("off", *ACTIONS):
            raise ValueError(
                f"`collapse_guard` is {self.collapse_guard!r}, but must be one of off, {', '.join(ACTIONS)}."
            )
        if not self.rewards or (unknown := set(self.rewards) - set(qa.REWARDS)):
            raise ValueError(f"`rewards` is {sorted(unknown) if self.rewards else []}; choose from {[*qa.REWARDS]}.")


@dataclass
class Arguments:
    """Everything that a recipe and a command line say."""

    trainer_class: type[TurnLevelTrainer]
    task: TaskArguments
    rollout: RolloutArguments
    search: SearchArguments
    config: TurnLevelConfig
    model: ModelConfig

    def __post_init__(self) -> None:
        per_turn = sorted(qa.TURN_REWARDS.intersection(self.task.rewards))
        if self.config.turn_boundary == "tags" and per_turn:
            raise ValueError(
                f"`rewards` has {per_turn[0]!r}, one float per generation: `turn_boundary='tags'` makes more turns."
            )


def parse_arguments(words: Sequence[str] | None = None) -> Arguments:
    """Parse the command line, or `words`, and its `--config`: `trainer` first, for its config has the other fields."""
    words = override_source(sys.argv[1:] if words is None else words)
    first_look = TrlParser(TrainerArguments, add_help=False, allow_abbrev=False)
    choice, _ = first_look.parse_args_and_config(words, return_remaining_strings=True)
    trainer_class = TRAINERS[choice.trainer]
    groups = (TaskArguments, RolloutArguments, SearchArguments, trainer_class.config_class, ModelConfig)
    parser = TrlParser((TrainerArguments, *groups))
    return Arguments(trainer_class, *parser.parse_args_and_config(words)[1:])


def load_prompts(arguments: Arguments) -> tuple[Dataset, Dataset | None]:
    """The questions to train on and those to evaluate on, as prompts. What is downloaded is so once per machine."""
    task = arguments.task
    with arguments.config.main_process_first(desc="loading the questions"):
        train = _load_questions(task.train_questions, "train")
        evaluation = None if task.eval_questions is None else _load_questions(task.eval_questions, None)
    for question in (*train, *(evaluation or ())):
        if "choice" in task.rewards and not question.options:
            raise ValueError(f"`rewards` has 'choice', but {question.id} has no options; 'answer' is for both kinds.")
    return _as_prompts(train, arguments.rollout), evaluation and _as_prompts(evaluation, arguments.rollout)


def _load_questions(source: str, split: str | None) -> list[qa.Question]:
    return qa.load_benchmark(source, split) if source in qa.BENCHMARKS else qa.load_questions(source)


def _as_prompts(questions: Sequence[qa.Question], rollout: RolloutArguments) -> Dataset:
    return Dataset.from_list(qa.build_prompt_rows(questions, rollout.prompt_template, rollout.chat))


def build_rollout(arguments: Arguments, tokenizer: PreTrainedTokenizerBase) -> SearchRollout:
    """Protocol and limits are checked against the tokenizer before a large corpus is indexed."""
    config = arguments.config
    protocol = arguments.rollout.tag_protocol(tokenizer)
    limits = arguments.rollout.limits(config.max_completion_length)
    Collector(tokenizer, NoSearch(), protocol, limits)
    with config.main_process_first(desc="opening the search engine"):
        search = arguments.search.build_search(config.process_index).backend
    return SearchRollout(search, protocol, limits)


def build_trainer(arguments: Arguments) -> TurnLevelTrainer:
    task, config, model = arguments.task, arguments.config, arguments.model
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


def main() -> None:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # `rollout_func` is: that is why TRL is pinned
    trainer = build_trainer(parse_arguments())
    folder = trainer.args.output_dir
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model(folder)
    trainer.save_state()
    trainer.accelerator.print(f"The policy is in {folder}: a plain checkpoint, load it as any other.")
    if isinstance(trainer, SOPPOTrainer):
        trainer.accelerator.print(f"Its critic is in {folder}/critic: `sorl_trl.load_critic({folder!r})` loads it.")
    trainer.end()


if __name__ == "__main__":
    main()
