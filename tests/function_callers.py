"""Policies that know the leaderboard's tasks: one that does what solves them, and one that says nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from sorl_trl.evaluation.agents import Agent, in_worlds
from sorl_trl.rollout import Collector, Engine, Generation, Responder, RolloutArguments, RolloutLimits
from sorl_trl.rollout.environments.bfcl import Task
from tests.policies import SHAPE
from tests.tools import qwen_tokenizer

Script = Callable[[Task], Sequence[str]]
"""The messages of a policy in a task, in order."""


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


def scripted_agent(tokenizer: PreTrainedTokenizerBase, script: Script, protocol: str = "terse") -> Agent:
    """An agent for the leaderboard's tasks."""
    chat, responder, rows = in_worlds(RolloutArguments(protocol=protocol), tokenizer)
    limits = RolloutLimits(max_turns=1000, max_turn_tokens=100_000, max_observation_tokens=100_000)
    return Agent(
        tokenizer, Collector(tokenizer, responder, chat, limits), ScriptedEngine(tokenizer, responder, script), rows
    )


SOLUTION = "ls(a=True)"
"""Of the first request of `multi_turn_base_1`."""


def talking_policy() -> LlamaForCausalLM:
    """Says the solution or `D.`, and sometimes breaks off: a Markov chain of bytes in the weights of a Llama."""
    tokenizer: Any = qwen_tokenizer()
    torch.manual_seed(0)
    width = 320  # of five heads, each as wide as vLLM wants them
    shape = {**SHAPE, "hidden_size": width, "num_attention_heads": 5, "num_key_value_heads": 5}
    policy = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape))
    follows = {"\n": "lD", **{said: then for text in (SOLUTION, "D.") for said, then in pairwise(text)}}
    with torch.no_grad():
        policy.model.embed_tokens.weight.copy_(torch.eye(len(tokenizer), width))
        policy.lm_head.weight.zero_()
        for said, then in follows.items():
            policy.lm_head.weight[tokenizer.encode(then), tokenizer.encode(said)[0]] = 0.8
        policy.lm_head.weight[tokenizer.eos_token_id, tokenizer.encode(").")] = 1.0
    return policy
