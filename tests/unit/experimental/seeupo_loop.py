"""SeeUPO written out as a loop, on trajectories of `FixedRollout`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.losses import token_logps
from tests.policies import build_policy
from tests.trajectories import parity_reward

TURNS = 4
"""Iterations; no trajectory of `FixedRollout` has more than 3 turns."""
MINIBATCHES = 2
LEARNING_RATE = 0.5
EPSILON = 0.02


class Loop:
    """SeeUPO as a loop over turns, minibatches and trajectories, with an optimizer of one line.

    Of the minibatches of a trainer it reads which trajectories they have, and nothing that was computed.
    """

    def __init__(self, minibatches: list[dict[str, Any]], loss_type: str) -> None:
        self.model = build_policy().double()
        self.loss_type = loss_type
        self.minibatches = minibatches
        self.rows = [(m, i) for m, batch in enumerate(minibatches) for i in range(len(batch["completion_ids"]))]
        self.multiplier = dict.fromkeys(self.rows, 1.0)
        self.clipped = 0
        completions = [minibatches[m]["completion_ids"][i] for m, i in self.rows]
        masks = [minibatches[m]["completion_mask"][i].bool() for m, i in self.rows]
        rewards = parity_reward([ids[mask].tolist() for ids, mask in zip(completions, masks, strict=True)])
        self.rewards = dict(zip(self.rows, rewards, strict=True))

    def tokens(self, row: tuple[int, int], turn: int) -> Tensor:
        return self.minibatches[row[0]]["turn_ids"][row[1]] == turn

    def train(self) -> None:
        for turn in reversed(range(TURNS)):
            there = [row for row in self.rows if self.tokens(row, turn).any()]
            if there:
                old = self._logps()
                for minibatch in range(MINIBATCHES):
                    self._step(minibatch, turn, there, old)
                self._multiply(turn, there, old, self._logps())

    def _logps(self) -> list[Tensor]:
        return [token_logps(self, batch).detach() for batch in self.minibatches]

    def _step(self, minibatch: int, turn: int, there: list[tuple[int, int]], old: list[Tensor]) -> None:
        logps = token_logps(self, self.minibatches[minibatch])
        loss = logps.sum() * 0
        for row in there:
            if row[0] != minibatch:
                continue
            kept = self.tokens(row, turn)
            ratio = (logps[row[1]] - old[minibatch][row[1]])[kept].mean().exp()
            advantage = self.multiplier[row] * self._advantage(row, there)
            bounded = ratio.clamp(1 - EPSILON, 1 + EPSILON)
            self.clipped += int(bounded * advantage < ratio * advantage)
            weight = MINIBATCHES * self._share(row, turn, there)
            loss = loss - weight * torch.minimum(ratio * advantage, bounded * advantage)
        parameters = list(self.model.parameters())
        with torch.no_grad():
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter -= LEARNING_RATE * gradient

    def _share(self, row: tuple[int, int], turn: int, there: list[tuple[int, int]]) -> float:
        """Of a trajectory in the loss: by its tokens, or as large as the others'."""
        if self.loss_type == "dapo":
            return int(self.tokens(row, turn).sum()) / sum(int(self.tokens(other, turn).sum()) for other in there)
        return 1 / len(there)

    def _advantage(self, row: tuple[int, int], there: list[tuple[int, int]]) -> float:
        rewards = [self.rewards[other] for other in there]
        mean = math.fsum(rewards) / len(rewards)
        std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / max(len(rewards) - 1, 1))
        return min(max((self.rewards[row] - mean) / (std + 1e-6), -3.0), 3.0)

    def _multiply(self, turn: int, there: list[tuple[int, int]], old: list[Tensor], new: list[Tensor]) -> None:
        for m, i in there if turn else ():  # after turn 0 nothing depends on it
            ratio = float((new[m] - old[m])[i][self.tokens((m, i), turn)].mean().exp())
            self.multiplier[m, i] = min(max(self.multiplier[m, i] * min(max(ratio, 0.8), 1.2), 0.8), 1.2)
