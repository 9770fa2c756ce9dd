"""DAPO's refill (arXiv 2503.14476), bounded: other prompts replace groups with equal rewards."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import count
from typing import Annotated, Any, ClassVar

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import pad

from sorl_trl.checks import COUNT
from sorl_trl.methods import ScoredRollout, ZeroVariance
from sorl_trl.ops import turn_layout
from sorl_trl.trainers.agents import agent_fields, agents_of_all, names_of
from sorl_trl.trainers.base import TurnLevelTrainer
from sorl_trl.trainers.batch import AGENT_IDS, AGENT_NAMES, own_rows, token_count
from sorl_trl.trainers.config import TurnLevelConfig
from sorl_trl.trainers.rollout import Rollout

_OF_TURNS = ("turn_rewards", "has_turn_reward", "states")
"""The fields of a rollout that have a column per turn."""
_LEFT = ("prompt_ids", "prompt_mask")
"""Fields of a batch that are padded on the left. All others begin with the completion."""
_PADDING: Mapping[str, float] = {"tool_mask": 1, "turn_ids": -1, "importance_sampling_ratio": 1.0}
"""Field -> its padding value, if that is neither 0 nor the padding token."""
_TOKENS = ("prompt_ids", "completion_ids")


@dataclass
class GroupRefillConfig(TurnLevelConfig):
    """Configuration of [`GroupRefillTrainer`]: [`TurnLevelConfig`] plus the number of refills.

    Parameters:
        refill_rounds: The most batches of other prompts to sample for one training batch.
    """

    refill_rounds: Annotated[int, COUNT] = field(
        default=2,
        metadata={
            "help": "The most batches of other prompts to sample for one training batch, while it has groups with "
            "equal rewards. DAPO itself continues until there are none."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.async_staleness:
            raise ValueError(f"`async_staleness` is {self.async_staleness}, but must be 0 with group refill.")


class GroupRefillTrainer(TurnLevelTrainer):
    """`SOGRPOTrainer` that samples other prompts if all rewards of a group are equal: DAPO's refill, bounded.

    Each round samples a whole batch of prompts that are new to this training batch. A group with equal rewards is
    replaced by the new group at the same position, if that one's rewards differ. Groups that span processes thus stay
    whole, and no group appears twice. The method drops groups that no round could replace, so its `keep` must have
    `ZeroVariance`, as by default. `method="dapo"` is all of DAPO. All processes decide alike, from all rewards.

    Metrics: `groups/refill_rounds`; `groups/refilled`, the share of groups that were replaced; `groups/left`, the
    share that is dropped because all rewards were still equal.

    Example:

    ```python
    trainer = GroupRefillTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        args=GroupRefillConfig(output_dir="out", steps_per_generation=8, refill_rounds=2),
        method="dapo",
        train_dataset=dataset,
    )
    trainer.train()
    ```

    Raises:
        TypeError: `args` is not a `GroupRefillConfig`.
        ValueError: `train_dataset` has no other prompts or has images, the method lacks `ZeroVariance`, or any reason
            of `SOGRPOTrainer`.
    """

    config_class: ClassVar[type[TurnLevelConfig]] = GroupRefillConfig
    default_method: ClassVar[Mapping[str, Any]] = {"keep": (ZeroVariance(),)}
    args: GroupRefillConfig
    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "group-refill"]
    _refilled_at = -1, 0
    """The optimizer step of the last refilled batch, and how many batches were refilled before it at this step."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._check_method()
        self._check_dataset()

    def _check_method(self) -> None:
        found = [piece for piece in self.method.keep if isinstance(piece, ZeroVariance)]
        if not found:
            raise ValueError(
                f"`keep` of the method is {self.method.keep}, but must have ZeroVariance ('zero_variance'), which "
                "selects the groups to replace and drops those that cannot be replaced."
            )
        self._differs = found[0]
        credit = self.method.credit
        sums = getattr(credit, "aggregation", "sum_then_normalize") == "sum_then_normalize"
        if getattr(credit, "scale", "group") == "batch" or not sums:
            raise ValueError(
                f"`credit` of the method is {credit!r}, but a batch merged from several has no common spread: use the "
                "scale 'group' or 'none', and 'sum_then_normalize'."
            )

    def _check_dataset(self) -> None:
        dataset, prompts = self.train_dataset, self._prompts_per_batch()
        if not isinstance(dataset, Dataset):
            raise ValueError(
                f"`train_dataset` is of type {type(dataset).__name__}, but must be a `datasets.Dataset`, to draw "
                "prompts in any order."
            )
        if len(dataset) < 2 * prompts:
            raise ValueError(
                f"`train_dataset` has {len(dataset)} prompts, but a rollout takes {prompts} and refilling needs as "
                f"many others: at least {2 * prompts} in total."
            )
        if images := {"image", "images"} & set(dataset.column_names):
            raise ValueError(f"`train_dataset` has {images.pop()!r}, but batches with images cannot be merged.")

    def _prompts_per_batch(self) -> int:
        return int(self.args.generation_batch_size or 0) // int(self.num_generations)

    def _collect(self, inputs: list[dict[str, Any]]) -> Rollout:
        if not self.model.training:
            return super()._collect(inputs)
        fresh = self._fresh_rows(set(gather_object([repr(row) for row in inputs])))
        rollout = super()._collect(inputs)
        at_first = differs = self._differs(rollout.scored)
        rounds = 0
        while rounds < self.args.refill_rounds and not differs.all():
            others = next(fresh)
            if others is None:
                break
            rounds += 1
            other = super()._collect(self._own_share(others))
            takes = ~differs & self._differs(other.scored)
            rollout = merged(rollout, other, takes, self._tokenizer.pad_token_id)
            differs = differs | takes
        rollout.batch["num_items_in_batch"] = token_count(rollout.batch, self.accelerator)
        metrics = self._metrics["train"]
        metrics["groups/refill_rounds"].append(float(rounds))
        metrics["groups/refilled"].append((differs & ~at_first).float().mean().item())
        metrics["groups/left"].append((~differs).float().mean().item())
        return rollout

    def _fresh_rows(self, asked: set[str]) -> Iterator[list[dict[str, Any]] | None]:
        """For each round, rows that are not in `asked` nor in an earlier round; None when too few are left.

        They depend on the seed, the optimizer step, and the number of batches already refilled at this step, so all
        processes and a resumed run draw the same rows.
        """
        step, (last_step, filled) = self.state.global_step, self._refilled_at
        self._refilled_at = step, filled + 1 if step == last_step else 0
        seed = f"{self.args.seed}-{step}-{self._refilled_at[1]}"
        return _draw(self.train_dataset, asked, self._prompts_per_batch(), seed)

    def _own_share(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Repeat each row `num_generations` times, and return this process's share."""
        repeated = [dict(row) for row in rows for _ in range(self.num_generations)]
        share = len(repeated) // self.accelerator.num_processes
        own: list[dict[str, Any]] = own_rows(repeated, share, self.accelerator)
        return own


def merged(first: Rollout, second: Rollout, takes: Tensor, pad_token_id: int) -> Rollout:
    """A rollout of N trajectories: those of `second` where `takes` (N,) is True, and of `first` elsewhere."""
    own = first.own(takes)
    nothing = [None] * len(own)
    extra = {
        name: _chosen(first.extra.get(name, nothing), second.extra.get(name, nothing), own.tolist())
        for name in {**first.extra, **second.extra}
    }
    sampled = _chosen(first.sampled, second.sampled, own.tolist())
    batch = merged_batch(first.batch, second.batch, own, pad_token_id)
    batch |= agent_fields(sampled, batch["turn_ids"])
    scored = merged_rollout(first.scored, second.scored, takes)
    return Rollout(
        first.accelerator,
        _chosen(first.rows, second.rows, own.tolist()),
        sampled,
        batch,
        replace(scored, **agents_of_all(first.accelerator, sampled, names_of(batch))),
        _chosen(first.prompts, second.prompts, own.tolist()),
        _chosen(first.completions, second.completions, own.tolist()),
        extra,
    )


def _chosen(first: list[Any], second: list[Any], takes: list[bool]) -> list[Any]:
    return [b if taken else a for a, b, taken in zip(first, second, takes, strict=True)]


def merged_batch(
    first: Mapping[str, Any], second: Mapping[str, Any], takes: Tensor, pad_token_id: int
) -> dict[str, Any]:
    """A batch of B trajectories: the rows of `second` where `takes` (B,) is True, and of `first` elsewhere.

    Fields without a row per trajectory come from `first`. No trajectory may have been dropped yet.
    """
    # TRL makes no `tool_mask` if all tokens of a rollout are the policy's.
    first, second = ({"tool_mask": torch.ones_like(each["completion_mask"]), **each} for each in (first, second))
    merged: dict[str, Any] = {}
    for name, value in first.items():
        if name in (AGENT_IDS, AGENT_NAMES):
            continue  # each rollout numbers its agents
        other = second[name]
        if isinstance(value, list):
            merged[name] = _chosen(value, other, takes.tolist())
        elif value.dim() == 0:
            merged[name] = value
        else:
            padding = pad_token_id if name in _TOKENS else _PADDING.get(name, 0)
            merged[name] = _taken(value, other, takes, padding, on_the_left=name in _LEFT)
    return merged


def merged_rollout(first: ScoredRollout, second: ScoredRollout, takes: Tensor) -> ScoredRollout:
    """N trajectories of all processes: those of `second` where `takes` (N,) is True, and of `first` elsewhere."""
    merged: dict[str, Any] = {
        "turns": turn_layout(_taken(first.turns.turn_ids, second.turns.turn_ids, takes, padding=-1))
    }
    for name in (each.name for each in fields(first) if each.name not in ("agents", "agent_names")):
        value, other = getattr(first, name), getattr(second, name)
        if name in _OF_TURNS:
            merged[name] = _taken(value, other, takes)[:, : merged["turns"].num_turns]
        elif name != "reward_weights" and isinstance(value, Tensor):
            merged[name] = _taken(value, other, takes)
    return replace(first, **merged)


def _taken(a: Tensor, b: Tensor, takes: Tensor, padding: float = 0, on_the_left: bool = False) -> Tensor:
    """The rows of `b` where `takes` is True, else those of `a`, with `padding` where one of them is narrower."""
    if a.dim() == 2:
        width = max(a.size(1), b.size(1))
        missing = [width - a.size(1), width - b.size(1)]
        sides = [(each, 0) if on_the_left else (0, each) for each in missing]
        a, b = pad(a, sides[0], value=padding), pad(b, sides[1], value=padding)
    return torch.where(takes.view(-1, *[1] * (a.dim() - 1)), b, a)


def _draw(dataset: Dataset, asked: set[str], size: int, seed: str) -> Iterator[list[dict[str, Any]] | None]:
    """For each round, `size` rows that are not in `asked`, to which they are added; None if too few remain.

    Rows are compared as text, with all columns, because tasks may share a prompt or have none.
    """
    seen: set[int] = set()
    for round_number in count():
        generator = random.Random(f"{seed}-{round_number}")  # a text seeds all processes alike
        rows: list[dict[str, Any]] = []
        while len(rows) < size and len(seen) < len(dataset):
            index = generator.randrange(len(dataset))
            if index not in seen:
                seen.add(index)
                row = dataset[index]
                if repr(row) not in asked:
                    asked.add(repr(row))
                    rows.append(row)
        yield rows if len(rows) == size else None
