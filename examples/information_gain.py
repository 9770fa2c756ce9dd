"""IGPO's reward (arXiv 2510.14967), computed by the policy: it rewards turns that make the golden answer likelier.

IGPO scales gains and outcomes apart. Here they are summed: `coef` and `reward_weights` say how much each counts.

python quickstart.py  # writes the default questions and corpus
sorl train --config so_grpo --rewards f1 examples.information_gain.InformationGain
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import pad

from sorl_trl.ops import masked_mean
from sorl_trl.rollout.engines.base import positions_of
from sorl_trl.trainers.samples import Sample


class InformationGain:
    """The reward of a turn is r_k = s_{k+1} − s_k, times `coef`; the last turn of a trajectory gets none.

    s_k is the mean log-probability of the answer's tokens after the prompt, the completion up to turn k and `prefix`,
    at the sampling temperature. No gradient flows.

    Args:
        column: The dataset column with the answer: a string, or a list of strings, of which the first is used.
        prefix: The text that the policy would write right before an answer: an `<answer>` tag with `SearchRollout`.
        coef: Weight of the gain.
    """

    __name__ = "information_gain"

    def __init__(self, column: str = "golden_answers", prefix: str = "<answer> ", coef: float = 1.0) -> None:
        self.column, self.prefix, self.coef = column, prefix, coef
        self._trainer: Any = None

    def attach(self, trainer: Any) -> None:
        """Called by the trainer on construction; its policy scores the answers."""
        if trainer._is_vlm:
            raise ValueError("InformationGain scores the golden answer after text only, but the policy reads images.")
        self._trainer = trainer

    def __call__(self, _samples: Sequence[Sample], **columns: Any) -> list[list[float | None]]:
        """One gain per turn for each of B trajectories, None for turns without. All processes call it together."""
        if self.column not in columns:
            raise ValueError(f"`column` is {self.column!r}, but the data set has no such column: {sorted(columns)}.")
        window = positions_of(self._trainer.accelerator.unwrap_model(self._trainer.model))
        trajectories = [each.trajectory for each in _samples]
        asked = []
        for row, (trajectory, golden) in enumerate(zip(trajectories, columns[self.column], strict=True)):
            prefix, answer = self._answer(golden)
            for turn, (start, _) in enumerate(trajectory.spans):
                context = [*trajectory.read_before(start), *prefix]
                fits = window is None or len(context) + len(answer) <= window
                if fits and answer and len(trajectory.spans) > 1:  # one turn alone has no gain
                    asked.append(((row, turn), context, answer))
        asked.sort(key=lambda each: len(each[1]) + len(each[2]), reverse=True)  # for little padding
        found = self._scores([context for _, context, _ in asked], [answer for *_, answer in asked])
        scores = {place: score for (place, *_), score in zip(asked, found, strict=True)}

        def gain(row: int, turn: int) -> float | None:
            raised = scores.get((row, turn + 1), nan) - scores.get((row, turn), nan)
            return self.coef * raised if isfinite(raised) else None

        return [[gain(row, turn) for turn in range(len(each.spans))] for row, each in enumerate(trajectories)]

    def _answer(self, golden: Any) -> tuple[list[int], list[int]]:
        """The prefix's tokens and the answer's, tokenized as one text."""
        first = golden if golden is None or isinstance(golden, str) else next(iter(golden), None)
        texts = self.prefix, self.prefix + (first or "").strip()
        prefix, whole = (self._trainer._tokenizer.encode(text, add_special_tokens=False) for text in texts)
        split = len([*takewhile(lambda pair: pair[0] == pair[1], zip(prefix, whole, strict=False))])
        return whole[:split], whole[split:]

    def _scores(self, contexts: list[list[int]], answers: list[list[int]]) -> list[float]:
        """The mean log-probability of each answer after its context. All processes make as many passes."""
        trainer, count = self._trainer, len(answers)
        most = int(trainer.accelerator.gather(torch.tensor(count, device=trainer.accelerator.device)).max())
        if most == 0:
            return []
        idle = [[0]] * (most - count)
        prompt_ids, prompt_mask = self._padded(contexts + idle, "left")
        completion_ids, mask = self._padded(answers + idle, "right")
        batch = {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask}
        batch |= {"completion_ids": completion_ids, "completion_mask": mask}
        scores: list[float] = masked_mean(trainer._score(trainer.model, batch).logps, mask, dim=1).tolist()
        return scores[:count]

    def _padded(self, rows: Sequence[list[int]], side: str) -> tuple[Tensor, Tensor]:
        """(N, L) the rows padded on a side, and their mask."""
        ids = [torch.tensor(row, device=self._trainer.accelerator.device) for row in rows]
        pad_id = self._trainer._tokenizer.pad_token_id or 0
        return pad(ids, pad_id, side), pad([torch.ones_like(row) for row in ids], 0, side)
