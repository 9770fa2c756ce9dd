"""Train a search agent: `accelerate launch train.py --config recipes/so_grpo.yaml`.

`trainer` says which method trains it. Every field of `AgentArguments`, of that trainer's config (`SOGRPOConfig` or
`SOPPOConfig`) and of TRL's `ModelConfig` can stand in the recipe and be overridden on the command line. `--help` lists
them, with `--trainer so_ppo --help` for SO-PPO.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, ProgressCallback
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from sorl_trl import SearchRollout, SOGRPOTrainer, SOPPOTrainer, qa
from sorl_trl.diagnostics import CollapseGuard, TurnProgressCallback
from sorl_trl.diagnostics.collapse_guard import ACTIONS
from sorl_trl.evaluation import NoSearch
from sorl_trl.rollout import Collector, RolloutLimits, TagProtocol
from sorl_trl.sandbox import PROTOCOL as TERSE_PROTOCOL
from sorl_trl.search import BM25Index
from sorl_trl.trainers.base_config import TurnLevelConfig
from sorl_trl.trainers.base_trainer import TurnLevelTrainer

TRAINERS: dict[str, type[TurnLevelTrainer]] = {"so_grpo": SOGRPOTrainer, "so_ppo": SOPPOTrainer}
PROTOCOLS = {"search_r1": TagProtocol(), "terse": TERSE_PROTOCOL}
REWARDS: dict[str, Callable[..., Any]] = {
    "exact_match": qa.exact_match_reward,
    "f1": qa.f1_reward,
    "format": qa.format_reward,
    "search_hit": qa.search_hit_turn_reward,
}


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
class AgentArguments:
    """What the agent is asked, where it searches, and how far it may go."""

    train_questions: str = field(
        metadata={"help": "JSONL file of questions: `id`, `question`, `golden_answers`, `metadata`."}
    )
    corpus: str = field(
        metadata={"help": "JSONL file of passages: `id` and `contents`, or `id`, `title` and `content`."}
    )
    eval_questions: str | None = field(
        default=None, metadata={"help": "JSONL file of questions for `eval_strategy`, in the same schema."}
    )
    index: str | None = field(
        default=None, metadata={"help": "Directory of the BM25 index, built if missing. Default: beside the corpus."}
    )
    rewards: list[str] = field(
        default_factory=lambda: ["exact_match"],
        metadata={"help": f"Reward functions, summed with `reward_weights`: {', '.join(REWARDS)}."},
    )
    prompt_template: str = field(
        default=qa.SEARCH_R1_TEMPLATE, metadata={"help": "The prompt, with `{question}` where the question goes."}
    )
    chat: bool = field(
        default=False, metadata={"help": "Ask through the tokenizer's chat template; plain text by default."}
    )
    protocol: str = field(
        default="search_r1",
        metadata={"help": "How observations are worded: 'search_r1', or 'terse' for the sandbox's tiny policies."},
    )
    max_turns: int = field(default=2, metadata={"help": "Searches (or invalid actions) before the last generation."})
    max_turn_tokens: int = field(default=500, metadata={"help": "Tokens of one turn."})
    max_observation_tokens: int = field(default=500, metadata={"help": "Tokens of one observation, tags included."})
    on_long_observation: str = field(
        default="truncate", metadata={"help": "'truncate' a longer observation, or 'stop' the trajectory there."}
    )
    search_top_k: int = field(default=3, metadata={"help": "Passages per search."})
    collapse_guard: str = field(
        default="off",
        metadata={
            "help": "What to do when training seems to collapse: 'warn', 'stop', 'lower_lr', 'roll_back' to the last "
            "healthy checkpoint, or 'off'."
        },
    )

    def __post_init__(self) -> None:
        for name in ("train_questions", "corpus", "eval_questions"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ValueError(f"`{name}` is {path!r}, but there is no such file.")
        if self.protocol not in PROTOCOLS:
            raise ValueError(f"`protocol` is {self.protocol!r}, but must be one of {', '.join(PROTOCOLS)}.")
        if self.collapse_guard not in ("off", *ACTIONS):
            raise ValueError(
                f"`collapse_guard` is {self.collapse_guard!r}, but must be one of off, {', '.join(ACTIONS)}."
            )
        if not self.rewards or (unknown := set(self.rewards) - set(REWARDS)):
            raise ValueError(f"`rewards` is {sorted(unknown) if self.rewards else []}; choose from {list(REWARDS)}.")


@dataclass
class Arguments:
    """Everything that a recipe and a command line say."""

    trainer_class: type[TurnLevelTrainer]
    agent: AgentArguments
    config: TurnLevelConfig
    model: ModelConfig


def parse_arguments(words: Sequence[str] | None = None) -> Arguments:
    """Parse the command line, or `words`, and its `--config`: `trainer` first, for its config has the other fields."""
    first_look = TrlParser(TrainerArguments, add_help=False, allow_abbrev=False)
    choice, _ = first_look.parse_args_and_config(words, return_remaining_strings=True)
    trainer_class = TRAINERS[choice.trainer]
    parser = TrlParser((TrainerArguments, AgentArguments, trainer_class.config_class, ModelConfig))
    _, agent, config, model = parser.parse_args_and_config(words)
    return Arguments(trainer_class, agent, config, model)


def open_index(agent: AgentArguments, config: TurnLevelConfig) -> BM25Index:
    """The index beside the corpus, built by the main process where it is missing, never one of another corpus."""
    directory = Path(agent.index or f"{agent.corpus}.index")
    with config.main_process_first(desc="building the search index"):
        return BM25Index.open(agent.corpus, directory)


def load_prompts(agent: AgentArguments, path: str | None) -> Dataset | None:
    if path is None:
        return None
    return Dataset.from_list(qa.build_prompt_rows(qa.load_questions(path), agent.prompt_template, agent.chat))


def build_rollout(agent: AgentArguments, config: TurnLevelConfig, tokenizer: PreTrainedTokenizerBase) -> SearchRollout:
    """Protocol and limits are checked against the tokenizer before a large corpus is indexed."""
    limits = RolloutLimits(
        max_turns=agent.max_turns,
        max_turn_tokens=agent.max_turn_tokens,
        max_observation_tokens=agent.max_observation_tokens,
        max_trajectory_tokens=config.max_completion_length,
        top_k=agent.search_top_k,
        on_long_observation=agent.on_long_observation,  # type: ignore[arg-type]
    )
    protocol = PROTOCOLS[agent.protocol]
    Collector(tokenizer, NoSearch(), protocol, limits)
    return SearchRollout(open_index(agent, config), protocol, limits)


def build_trainer(arguments: Arguments) -> TurnLevelTrainer:
    agent, config, model = arguments.agent, arguments.config, arguments.model
    if config.turn_boundary == "tags" and "search_hit" in agent.rewards:
        raise ValueError(
            "`rewards` has 'search_hit', one float per generation: `turn_boundary='tags'` makes more turns."
        )
    tokenizer = AutoTokenizer.from_pretrained(
        model.model_name_or_path, revision=model.model_revision, trust_remote_code=config.trust_remote_code
    )
    config.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(config.model_init_kwargs or {}),
    }
    trainer = arguments.trainer_class(
        model=model.model_name_or_path,
        reward_funcs=[REWARDS[name] for name in agent.rewards],
        args=config,
        train_dataset=load_prompts(agent, agent.train_questions),
        eval_dataset=load_prompts(agent, agent.eval_questions),
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
        rollout_func=build_rollout(agent, config, tokenizer),
    )
    if agent.collapse_guard != "off":
        trainer.add_callback(CollapseGuard(agent.collapse_guard, trainer))
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
