"""DAPO's refill (arXiv 2503.14476), bounded: other prompts replace groups with equal rewards."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from accelerate.utils import gather_object
from datasets import Dataset

from sorl_trl.checks import COUNT
from sorl_trl.methods import ScoredRollout, ZeroVariance
from sorl_trl.trainers.base import TurnLevelTrainer
from sorl_trl.trainers.batch import own_rows
from sorl_trl.trainers.config import TurnLevelConfig
from sorl_trl.trainers.rewards import scored_rollout
from sorl_trl.trainers.samples import Sample


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
        found = [piece for piece in self.method.keep if isinstance(piece, ZeroVariance)]
        if not found:
            raise ValueError(
                f"`keep` of the method is {self.method.keep}, but must have ZeroVariance ('zero_variance'), which "
                "selects the groups to replace and drops those that cannot be replaced."
            )
        self._differs = found[0]
        self._prompts = int(self.args.generation_batch_size or 0) // int(self.num_generations)
        self._check_dataset(self.train_dataset, self._prompts)

    @staticmethod
    def _check_dataset(dataset: Any, prompts: int) -> None:
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
            raise ValueError(f"`train_dataset` has {images.pop()!r}, but rows with images cannot be compared.")

    def _sample(self, rows: list[dict[str, Any]]) -> tuple[list[Sample], ScoredRollout]:
        if not self.model.training:
            return super()._sample(rows)
        fresh = self._fresh(rows)
        samples, scored = super()._sample(rows)
        at_first = differs = self._differs(scored)
        rounds = 0
        while rounds < self.args.refill_rounds and not differs.all() and (others := next(fresh, None)):
            rounds += 1
            replacements, of_others = super()._sample(others)
            takes = ~differs & self._differs(of_others)
            own = own_rows(takes.tolist(), len(samples), self.accelerator)
            samples = [b if taken else a for a, b, taken in zip(samples, replacements, own, strict=True)]
            differs = differs | takes
        metrics = self._metrics["train"]
        metrics["groups/refill_rounds"].append(float(rounds))
        metrics["groups/refilled"].append((differs & ~at_first).float().mean().item())
        metrics["groups/left"].append((~differs).float().mean().item())
        return samples, scored_rollout(self._host, samples) if rounds else scored

    def _fresh(self, rows: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
        """For each round, this process's share of a batch of rows that no process has asked, until too few are left.

        Rows are compared as text, with all columns, because tasks may share a prompt or have none. Their order depends
        on the seed, the optimizer step, and the number of batches already refilled at this step, so all processes and
        a resumed run draw the same rows.
        """
        step, (last_step, filled) = self.state.global_step, self._refilled_at
        self._refilled_at = step, filled + 1 if step == last_step else 0
        seed = random.Random(f"{self.args.seed}-{step}-{self._refilled_at[1]}").getrandbits(63)
        order = torch.randperm(len(self.train_dataset), generator=torch.Generator().manual_seed(seed))
        asked, found = set(gather_object([repr(row) for row in rows])), []
        for row in (self.train_dataset[index] for index in order.tolist()):
            if repr(row) in asked:
                continue
            asked.add(repr(row))
            found.append(row)
            if len(found) == self._prompts:
                repeated = [dict(each) for each in found for _ in range(self.num_generations)]
                found.clear()
                yield own_rows(repeated, len(rows), self.accelerator)
