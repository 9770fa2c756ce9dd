"""Information gain as a turn reward: how much likelier each turn makes the golden answer under the policy itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trl.models.utils import disable_gradient_checkpointing

from sorl_trl.checks import NOT_NEGATIVE
from sorl_trl.ops import information_gains, masked_mean
from sorl_trl.rollout import TagProtocol
from sorl_trl.rollout.generation import positions_of
from sorl_trl.trainers.sampled import Sampled

TAG_PREFIX = "<answer> "
"""The text that a policy with a tag protocol writes before its answer."""


@dataclass(frozen=True)
class _Scored:
    """A context and an answer, whose log-probabilities the policy computes."""

    trajectory: int
    turn: int
    context: Sequence[int]
    answer: Sequence[int]

    def __len__(self) -> int:
        return len(self.context) + len(self.answer)


class InformationGain:
    """IGPO's turn reward (arXiv 2510.14967): how much likelier each turn makes the golden answer under the policy.

    Pass it in the `reward_funcs` of a trainer of this package, beside an outcome reward; `method="igpo"` is IGPO's
    credit. The reward of a turn is r_k = s_{k+1} − s_k, times `coef`. s_k is the mean log-probability of the answer's
    tokens after the prompt, the completion up to turn k and an answer's prefix, at the sampling temperature. No
    gradient flows. The last turn of a trajectory gets no reward.

    Args:
        column: The dataset column with the answer: a string, or a list of strings, of which the first is taken.
        prefix: The text that the policy would write right before an answer. None takes the `<answer>` tag if the
            rollout has a tag protocol (`SearchRollout`), else nothing.
        coef: Weight of the gain. `method="igpo"` cancels it, unless another function gives turn rewards, too.

    Raises:
        ValueError: The policy reads images, which these contexts lack, or a row has no such column.
    """

    __name__ = "information_gain"

    def __init__(self, column: str = "golden_answers", prefix: str | None = None, coef: float = 1.0) -> None:
        NOT_NEGATIVE.check("coef", coef)
        self.column, self.prefix, self.coef = column, prefix, coef
        self._trainer: Any = None

    def attach(self, trainer: Any) -> None:
        """Take the trainer whose policy scores answers. The trainer calls this."""
        if trainer._is_vlm:
            raise ValueError("InformationGain scores the golden answer after text alone, but the policy reads images.")
        self._trainer = trainer
        protocol = getattr(inspect.unwrap(trainer.rollout_func), "protocol", None) if trainer.rollout_func else None
        has_tags = isinstance(protocol, TagProtocol) and not protocol.turns_are_messages
        tag = TAG_PREFIX if has_tags else ""
        self._prefix = tag if self.prefix is None else self.prefix

    def __call__(self, sampled: Sequence[Sampled], **columns: Any) -> list[list[float | None]]:
        """One gain per turn for each of B trajectories, None for a turn without. All processes call it together.

        `sampled` are the trajectories, which the trainer adds to the columns of the dataset.
        """
        if self.column not in columns:
            raise ValueError(
                f"`column` is {self.column!r}, but the data set has no such column: it has {sorted(columns)}. Leave "
                "`remove_unused_columns` at False."
            )
        counts = torch.tensor([len(row.turns) for row in sampled], device=self._trainer.accelerator.device)
        has_turn = torch.arange(max(1, *counts.tolist()), device=counts.device) < counts.unsqueeze(1)
        asked = self._asked(sampled, [self._answer(each) for each in columns[self.column]])
        scores = torch.full(has_turn.shape, torch.nan, device=counts.device)
        values = self._scores(asked)
        if asked:
            scores[[one.trajectory for one in asked], [one.turn for one in asked]] = values.to(scores)
        gains, has_gain = information_gains(scores, has_turn)
        rows = zip(gains.tolist(), has_gain.tolist(), counts.tolist(), strict=True)
        return [
            [self.coef * gain if found else None for gain, found in zip(row[:count], has[:count], strict=True)]
            for row, has, count in rows
        ]

    def _answer(self, golden: Any) -> tuple[list[int], list[int]]:
        """The prefix's tokens and the answer's, tokenized as one text."""
        is_list = isinstance(golden, Iterable) and not isinstance(golden, str)
        text = ((next(iter(golden), None) if is_list else golden) or "").strip()
        prefix, whole = (self._encode(each) for each in (self._prefix, f"{self._prefix}{text}" if text else ""))
        shared = next((i for i, pair in enumerate(zip(prefix, whole, strict=False)) if pair[0] != pair[1]), None)
        split = min(len(prefix), len(whole)) if shared is None else shared
        return whole[:split], whole[split:]

    def _encode(self, text: str) -> list[int]:
        return self._trainer._tokenizer.encode(text, add_special_tokens=False) if text else []

    def _asked(self, sampled: Sequence[Sampled], answers: Sequence[tuple[list[int], list[int]]]) -> list[_Scored]:
        """What to score. It leaves out trajectories of one turn, which have no gain, and what exceeds the window."""
        window = positions_of(self._trainer.accelerator.unwrap_model(self._trainer.model))
        asked = []
        for row, (trajectory, (prefix, answer)) in enumerate(zip(sampled, answers, strict=True)):
            if len(trajectory.turns) < 2 or not answer:
                continue
            for turn, (start, _) in enumerate(trajectory.turns):
                one = _Scored(row, turn, [*trajectory.read_before(start), *prefix], answer)
                if window is None or len(one) <= window:
                    asked.append(one)
        return asked

    def _scores(self, asked: Sequence[_Scored]) -> Tensor:
        """(N,) mean log-probability of each answer. All ranks make as many passes as the one with most."""
        trainer, args = self._trainer, self._trainer.args
        is_training = trainer.model.training
        size = args.per_device_train_batch_size if is_training else args.per_device_eval_batch_size
        count = torch.tensor(len(asked), device=trainer.accelerator.device)
        most = int(trainer.accelerator.gather(count).max())
        order = sorted(range(len(asked)), key=lambda i: len(asked[i]), reverse=True)  # for little padding
        scores = torch.full((len(asked),), torch.nan, device=trainer.accelerator.device)
        with torch.no_grad(), disable_gradient_checkpointing(trainer.model, args.gradient_checkpointing_kwargs):
            for first in range(0, most, size):
                chosen = order[first : first + size]
                values = self._pass([asked[i] for i in chosen] or [_Scored(0, 0, [0], [0])])
                if chosen:
                    scores[chosen] = values.to(scores.dtype)
        return scores

    def _pass(self, asked: Sequence[_Scored]) -> Tensor:
        """(N,) from one pass of the policy, with contexts as prompts and answers as completions."""
        prompts = self._padded([[*map(int, one.context)] for one in asked], "left")
        answers = self._padded([one.answer for one in asked], "right")
        batch = {"prompt_ids": prompts[0], "prompt_mask": prompts[1]}
        batch |= {"completion_ids": answers[0], "completion_mask": answers[1]}
        return masked_mean(self._trainer._forward(self._trainer.model, batch).logps, answers[1], dim=1)

    def _padded(self, rows: Sequence[Sequence[int]], side: str) -> tuple[Tensor, Tensor]:
        """(N, L) the rows padded on a side, and their mask."""
        ids = [torch.tensor(row, device=self._trainer.accelerator.device) for row in rows]
        value = self._trainer._tokenizer.pad_token_id or 0
        return (
            pad_sequence(ids, batch_first=True, padding_value=value, padding_side=side),
            pad_sequence([torch.ones_like(row) for row in ids], batch_first=True, padding_side=side),
        )
