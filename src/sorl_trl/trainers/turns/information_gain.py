"""Information gain as a turn reward: how much likelier each turn makes the golden answer to the policy itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing

from sorl_trl.ops import information_gains, masked_mean
from sorl_trl.rollout import TagProtocol
from sorl_trl.rollout.generation import positions_of
from sorl_trl.trainers.turns.recording import Generated, ScoredRollout
from sorl_trl.trainers.turns.states import turn_spans

if TYPE_CHECKING:
    from sorl_trl.trainers.base_config import TurnLevelConfig

TAG_PREFIX = "<answer> "
"""What a policy that speaks the tag protocol writes before its answer."""


@dataclass(frozen=True)
class _Scored:
    """What is asked of the policy: its log-probabilities of the answer after a context."""

    trajectory: int
    turn: int
    context: Sequence[int]
    answer: Sequence[int]

    def __len__(self) -> int:
        return len(self.context) + len(self.answer)


class InformationGain:
    """Scores the golden answer in the state where each turn starts, and adds each turn's gain to its rewards.

    s_k is the mean log-probability of the answer's tokens, at the sampling temperature as all log-probabilities of
    TRL's trainer are, after the prompt, the completion up to turn k and the prefix of an answer. No gradient flows.

    Args:
        trainer: a turn-level trainer, built but for its data.

    Raises:
        ValueError: the policy reads images, which these contexts have not.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._args: TurnLevelConfig = trainer.args
        if trainer._is_vlm:
            raise ValueError(
                f"`information_gain_coef` is {self._args.information_gain_coef}, but the policy may read images, and "
                "the golden answer is scored after text alone. Set `information_gain_coef=0`."
            )
        self._prefix = self._args.information_gain_prefix
        if self._prefix is None:
            protocol = (
                getattr(inspect.unwrap(trainer.rollout_func), "protocol", None) if trainer.rollout_func else None
            )
            self._prefix = TAG_PREFIX if isinstance(protocol, TagProtocol) else ""

    def added_to(self, rollout: ScoredRollout, inputs: Sequence[Mapping[str, Any]]) -> ScoredRollout:
        """The rollout with `information_gain_coef` times the gains among its turn rewards.

        Every rank must call it for the same rollout, and each makes equally many passes of the policy.

        Args:
            rollout: B trajectories of this rank.
            inputs: their B rows of the data set.
        """
        gains, has_gain = self._gains(rollout, inputs)
        self._log(gains, has_gain, rollout.turns.counts)
        gains = self._args.information_gain_coef * gains
        return replace(
            rollout,
            turn_rewards=rollout.turn_rewards + gains,
            has_turn_rewards=True,
            kinds=rollout.kinds and rollout.kinds.with_gains(gains, has_gain),
        )

    def _gains(self, rollout: ScoredRollout, inputs: Sequence[Mapping[str, Any]]) -> tuple[Tensor, Tensor]:
        answers = [self._answer(row[self._args.information_gain_column]) for row in inputs]
        asked = self._asked(rollout.generated, answers)
        scores = rollout.turn_rewards.new_full(rollout.turns.turn_mask.shape, torch.nan)
        values = self._scores(asked)
        if asked:
            rows, turns = (torch.tensor(index, device=scores.device) for index in zip(*_cells(asked), strict=True))
            scores[rows, turns] = values.to(scores)
        return information_gains(scores, rollout.turns.turn_mask)

    def _answer(self, golden: Any) -> tuple[list[int], list[int]]:
        """The prefix's tokens and the answer's, as they are written one after the other."""
        text = first_answer(golden, self._args.information_gain_column).strip()
        prefix, whole = (self._encode(each) for each in (self._prefix, f"{self._prefix}{text}" if text else ""))
        shared = next((i for i, pair in enumerate(zip(prefix, whole, strict=False)) if pair[0] != pair[1]), None)
        split = min(len(prefix), len(whole)) if shared is None else shared
        return whole[:split], whole[split:]

    def _encode(self, text: str | None) -> list[int]:
        return self._trainer._tokenizer.encode(text or "", add_special_tokens=False) if text else []

    def _asked(self, generated: Generated, answers: Sequence[tuple[list[int], list[int]]]) -> list[_Scored]:
        """What is scored: nothing of a trajectory with one turn, which has no gain, nor beyond the policy's window."""
        window = positions_of(self._trainer.accelerator.unwrap_model(self._trainer.model))
        asked = []
        columns = zip(generated.prompt_ids, generated.completion_ids, generated.turn_ids, answers, strict=True)
        for row, (prompt, completion, turn_ids, (prefix, answer)) in enumerate(columns):
            spans = turn_spans(turn_ids)
            if len(spans) < 2 or not answer:
                continue
            for turn, (start, _) in enumerate(spans):
                one = _Scored(row, turn, [*prompt, *completion[:start], *prefix], answer)
                if window is None or len(one) <= window:
                    asked.append(one)
        return asked

    def _scores(self, asked: Sequence[_Scored]) -> Tensor:
        """(N,) mean log-probability of each answer. All ranks make as many passes as the one with most."""
        trainer, args = self._trainer, self._args
        is_training = trainer.model.training
        size = args.per_device_train_batch_size if is_training else args.per_device_eval_batch_size
        count = torch.tensor(len(asked), device=trainer.accelerator.device)
        most = int(trainer.accelerator.gather(count).max())
        order = sorted(range(len(asked)), key=lambda i: len(asked[i]), reverse=True)  # equally long ones together
        scores = torch.full((len(asked),), torch.nan, device=trainer.accelerator.device)
        with torch.no_grad(), disable_gradient_checkpointing(trainer.model, args.gradient_checkpointing_kwargs):
            for first in range(0, most, size):
                chosen = order[first : first + size]
                values = self._pass([asked[i] for i in chosen] or [_Scored(0, 0, [0], [0])])
                if chosen:
                    scores[chosen] = values.to(scores.dtype)
        return scores

    def _pass(self, asked: Sequence[_Scored]) -> Tensor:
        """One pass of the policy: contexts padded on the left, answers on the right."""
        before, after = max(len(one.context) for one in asked), max(len(one.answer) for one in asked)
        ids = torch.full((len(asked), before + after), self._trainer._tokenizer.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        for row, one in enumerate(asked):
            own = slice(before - len(one.context), before + len(one.answer))
            ids[row, own] = torch.tensor([*map(int, one.context), *one.answer])
            mask[row, own] = 1
        device = self._trainer.accelerator.device
        ids, mask = ids.to(device), mask.to(device)
        logps, _, _ = self._trainer._get_per_token_logps_and_entropies(self._trainer.model, ids, mask, after)
        return masked_mean(logps, mask[:, before:], dim=1)

    def _log(self, gains: Tensor, has_gain: Tensor, counts: Tensor) -> None:
        """Over all ranks: the mean gain of a turn, and the share of turns before a last one that have none."""
        possible = (counts - 1).clamp(min=0).sum()
        sums = torch.stack([gains.sum(), has_gain.sum().to(gains), possible.to(gains)])
        total, found, turns = self._trainer.accelerator.gather(sums[None]).sum(0).tolist()
        metrics = self._trainer._metrics["train" if self._trainer.model.training else "eval"]
        metrics["information_gain/mean"].append(total / max(found, 1))
        metrics["information_gain/missing"].append(1 - found / max(turns, 1) if turns else 0.0)


def _cells(asked: Sequence[_Scored]) -> list[tuple[int, int]]:
    return [(one.trajectory, one.turn) for one in asked]


def first_answer(golden: Any, column: str) -> str:
    """The answer of a row, empty where it has none."""
    is_list = isinstance(golden, Iterable) and not isinstance(golden, str)
    first = next(iter(golden), None) if is_list else golden
    if first is not None and not isinstance(first, str):
        raise ValueError(
            f"The column {column!r} holds {golden!r}, but `information_gain_column` must hold a string or a list of "
            "strings: the golden answer."
        )
    return first or ""
