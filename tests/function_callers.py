"""Policies that know the leaderboard's tasks: one that does what solves them, and one that says nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from transformers import PreTrainedTokenizerBase

from sorl_trl.evaluation.agents import Agent, in_worlds
from sorl_trl.rollout import (
    Collector,
    Engine,
    EnvironmentResponder,
    Generation,
    Responder,
    RolloutArguments,
    RolloutLimits,
)
from sorl_trl.rollout.environments.bfcl import BFCLEnvironment, Task

Script = Callable[[Task], Sequence[str]]
"""The messages of a policy in a task, in order."""


def solving(task: Task) -> list[str]:
    """All calls of a request in one message, then that it is done."""
    return [said for calls in task.solution for said in ([f"[{', '.join(calls)}]"] if calls else []) + ["Done."]]


def silent(task: Task) -> list[str]:
    return [""] * len(task.requests)


class ScriptedEngine(Engine):
    """Gives each row the messages of its task's script; the environments of the rollout say which task that is."""

    in_turns = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, responder: Responder, script: Script) -> None:
        super().__init__()
        self.tokenizer, self.responder, self.script = tokenizer, responder, script
        self.left: dict[int, deque[str]] = {}
        self.asked: list[int] = []

    def open(self, rows: int) -> None:
        super().open(rows)
        self.left, self.asked = {}, []

    def submit(self, row: int, context_ids: Sequence[int], limit: int) -> None:
        if row not in self.left:
            self.left[row] = deque(self.script(self.responder.environments[row].task))
        self.asked.append(row)

    def poll(self) -> list[tuple[int, Generation]]:
        asked, self.asked = self.asked, []
        said = ((row, self.tokenizer.encode(self.left[row].popleft(), add_special_tokens=False)) for row in asked)
        return [(row, Generation((*ids, int(self.tokenizer.eos_token_id)), None, stopped=True)) for row, ids in said]

    @property
    def idle(self) -> bool:
        return not self.asked

    def release(self, row: int) -> None:
        pass

    def close(self) -> None:
        pass


def scripted_agent(tokenizer: PreTrainedTokenizerBase, script: Script) -> Agent:
    """An agent for the leaderboard's tasks. Its worlds may take their time: on a machine that is busy, they do."""
    chat, _, rows = in_worlds(RolloutArguments(protocol="terse"), tokenizer)
    responder = EnvironmentResponder(partial(BFCLEnvironment, True), timeout_s=inf)
    limits = RolloutLimits(max_turns=1000, max_turn_tokens=100_000, max_observation_tokens=100_000)
    collector = Collector(tokenizer, responder, chat, limits)
    return Agent(tokenizer, collector, ScriptedEngine(tokenizer, responder, script), rows)
