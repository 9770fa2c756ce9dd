"""Asks again, with other prompts, where a group's rewards are all equal: `group_refill` (DAPO, arXiv 2503.14476)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor

from sorl_trl.checks import Problem, raise_first
from sorl_trl.ops import group_spread, kept_groups
from sorl_trl.trainers.loss.micro_batch import loss_mask_of
from sorl_trl.trainers.turns.merging import merge
from sorl_trl.trainers.turns.selection import deciding_rewards


@dataclass(frozen=True)
class ScoredBatch:
    """B trajectories of one rank, with their advantages, before any of them is dropped."""

    output: dict[str, Any]
    """As `_generate_and_score_completions` returns it."""
    examples: list[dict[str, Any]]
    """Their rows of the training set, with what the rollout has added."""
    rewards_per_func: Tensor
    """(B, F)."""


def check_refill(args: Any, dataset: Any) -> None:
    """Raise ValueError for a `train_dataset` that has no other prompts to ask.

    Args:
        args: of the trainer.
        dataset: its `train_dataset`.
    """
    if not args.group_refill:
        return
    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"`group_refill` is {args.group_refill}, but `train_dataset` is of type {type(dataset).__name__}, which "
            "gives no prompts out of turn: it must be a `datasets.Dataset`. Set `group_refill=0`, or use one."
        )
    raise_first(refill_size_problems("train_dataset", len(dataset), args))
    if images := {"image", "images"} & set(dataset.column_names):
        raise ValueError(
            f"`group_refill` is {args.group_refill}, but `train_dataset` has {images.pop()!r}: batches of images "
            "cannot be put together. Set `group_refill=0`."
        )


def refill_size_problems(argument: str, prompts: int, args: Any) -> Iterator[Problem]:
    """Whether a rollout leaves as many other prompts as it takes, of those that `argument` gives.

    Args:
        argument: by what the prompts are given.
        prompts: how many these are.
        args: of the trainer.
    """
    groups = int(args.generation_batch_size or 0) // int(args.num_generations or 1)
    if args.group_refill and prompts < 2 * groups:
        yield Problem(
            "group_refill",
            f"`group_refill` is {args.group_refill}, but `{argument}` has {prompts} prompts and a rollout takes "
            f"{groups}: there must be as many others, {2 * groups} in all. Give more, or set `group_refill=0`.",
            0,
        )


class GroupRefill:
    """Fills the slots of groups without a spread with groups of other prompts, up to a number of rounds.

    A round asks a whole batch of prompts, none of which was asked for this batch before. A slot whose group has no
    spread takes the group of the same place if that has one: groups that lie across ranks stay whole, none is ever
    there twice, and what no round could fill is left to `group_filter`. All ranks decide alike, from all rewards.

    Args:
        trainer: a `GRPOTrainer` with our configuration.
        score: makes a batch of B rows of the dataset; all ranks call it together.
    """

    def __init__(self, trainer: Any, score: Callable[[list[dict[str, Any]]], ScoredBatch]) -> None:
        self._trainer = trainer
        self._score = score
        self._step, self._rollouts = -1, 0
        self.rounds = 0
        """How often other prompts were asked for the last batch of training."""

    def fill(self, examples: list[dict[str, Any]]) -> ScoredBatch:
        """The batch of these B rows of the dataset, with other groups where theirs had no spread."""
        fresh = self._fresh_prompts(set(gather_object(list(map(_prompt_of, examples)))))
        batch = self._score(examples)
        before = differs = self._differs(batch)
        rounds = 0
        while rounds < self._trainer.args.group_refill and not differs.all():
            others = next(fresh)
            if others is None:
                break
            rounds += 1
            candidate = self._score(self._of_rank(others))
            takes = ~differs & self._differs(candidate)
            batch = self._merged(batch, candidate, takes)
            differs = differs | takes
        self.rounds = rounds
        metrics = self._trainer._metrics["train"]
        metrics["groups/refill_rounds"].append(float(rounds))
        metrics["groups/refilled"].append((differs & ~before).float().mean().item())
        metrics["groups/left"].append((~differs).float().mean().item())
        return batch

    def _differs(self, batch: ScoredBatch) -> Tensor:
        """(N,) bool, of the groups of all ranks."""
        rewards = deciding_rewards(self._trainer, batch.rewards_per_func)
        return kept_groups(group_spread(rewards, self._trainer.num_generations), "zero_variance")

    def _fresh_prompts(self, asked: set[str]) -> Iterator[list[dict[str, Any]] | None]:
        """For each round N rows of the dataset whose prompts are not `asked`, nor of a round before; None at its end.

        They depend on the seed, the optimizer step and the rollouts since: a resumed run draws the same.
        """
        trainer, dataset = self._trainer, self._trainer.train_dataset
        step = trainer.state.global_step
        self._step, self._rollouts = step, self._rollouts + 1 if step == self._step else 0
        return self._draw(dataset, asked, f"{trainer.args.seed}-{step}-{self._rollouts}")

    def _draw(self, dataset: Any, asked: set[str], seed: str) -> Iterator[list[dict[str, Any]] | None]:
        groups = self._trainer.args.generation_batch_size // self._trainer.num_generations
        seen: set[int] = set()
        for round_number in count():
            generator = random.Random(f"{seed}-{round_number}")  # of a text: the same in every process
            rows: list[dict[str, Any]] = []
            while len(rows) < groups and len(seen) < len(dataset):
                index = generator.randrange(len(dataset))
                if index not in seen:
                    seen.add(index)
                    row = dataset[index]
                    if _prompt_of(row) not in asked:
                        asked.add(_prompt_of(row))
                        rows.append(row)
            yield rows if len(rows) == groups else None

    def _of_rank(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Each row `num_generations` times, and of these what is this rank's."""
        repeated = [dict(row) for row in rows for _ in range(self._trainer.num_generations)]
        accelerator = self._trainer.accelerator
        share = len(repeated) // accelerator.num_processes
        return repeated[accelerator.process_index * share :][:share]

    def _merged(self, batch: ScoredBatch, candidate: ScoredBatch, groups: Tensor) -> ScoredBatch:
        """Of this rank, with the rows of `candidate` in these (N,) groups of all ranks."""
        accelerator, rows = self._trainer.accelerator, len(batch.examples)
        takes = groups.repeat_interleave(self._trainer.num_generations)
        takes = takes[accelerator.process_index * rows :][:rows]
        output = merge(batch.output, candidate.output, takes, self._trainer._tokenizer.pad_token_id)
        output["num_items_in_batch"] = accelerator.gather(loss_mask_of(output).sum()).sum()
        pairs = zip(batch.examples, candidate.examples, takes.tolist(), strict=True)
        examples = [new if is_taken else old for old, new, is_taken in pairs]
        rewards = torch.where(takes.unsqueeze(1), candidate.rewards_per_func, batch.rewards_per_func)
        return ScoredBatch(output, examples, rewards)


def _prompt_of(row: Mapping[str, Any]) -> str:
    """By which two rows are the same question; an environment's rows need not have a prompt."""
    return repr(row.get("prompt", row))
