"""Trajectories of a frozen policy, and what follows when it goes on from a state in the middle of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from benchmarks.worlds import QuestionWorld
from sorl_trl import qa
from sorl_trl.evaluation import encode_prompts
from sorl_trl.rollout import Collector, RolloutLimits, TurnEnd, assemble, model_engine
from sorl_trl.sandbox import PROMPT_TEMPLATE, PROTOCOL, TRAIN_FILE
from sorl_trl.search import BM25Index
from sorl_trl.types import Trajectory, Turn

BATCH = 512
"""Trajectories that decode together."""
SAMPLED = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)


@dataclass(frozen=True)
class State:
    """Where turn `turn` of a trajectory starts."""

    question: int
    turn: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    """Turns and observations so far."""


@dataclass(frozen=True)
class Sample:
    """Trajectories as the critic reads them."""

    input_ids: Tensor
    """(N, L), prompt and completion, padded on the right with 0."""
    lengths: Tensor
    """(N,)"""
    before_turns: Tensor
    """(N, K), index of the last token before turn k; -1 where a trajectory has no such turn."""
    returns: Tensor
    """(N,), the reward: with a discount of 1 and nothing paid before the end, the return of every turn."""
    targets: Tensor
    """(N, K), what V(s_k) is trained towards."""

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self, rows: Tensor) -> Sample:
        return Sample(*(tensor[rows] for tensor in vars(self).values()))


class FrozenPolicy:
    """A policy and the questions of its training world.

    Args:
        policy: folder of the model and its tokenizer.
        folder: of the world, as `QuestionWorld.prepare` returned it.
        world: the kind of world.
    """

    def __init__(self, policy: Path, folder: Path, world: QuestionWorld) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
        self._model = AutoModelForCausalLM.from_pretrained(policy).eval()
        self._end = TurnEnd(self._tokenizer, PROTOCOL.stop_strings, [self._tokenizer.eos_token_id])
        self._search = BM25Index.load(folder / "train" / "index")
        self._limits = world.limits
        self.questions = qa.load_questions(folder / "train" / TRAIN_FILE)
        self._prompts = encode_prompts(self._tokenizer, qa.build_prompt_rows(self.questions, PROMPT_TEMPLATE))

    def trajectories(self, questions: Sequence[int]) -> list[Trajectory]:
        """One for each of `questions`, indices of the world's."""
        return self._collect([self._prompts[i] for i in questions], self._limits)

    def rewards(self, questions: Sequence[int], trajectories: Sequence[Trajectory]) -> list[float]:
        golden = (self.questions[i].golden_answers for i in questions)
        return [float(qa.score_exact_match(t, g)) for t, g in zip(trajectories, golden, strict=True)]

    def continued_returns(self, states: Sequence[State], continuations: int) -> Tensor:
        """(N, M): the returns of M independent continuations from each of N states of the same turn index."""
        (turn,) = {state.turn for state in states}
        repeated = [state for state in states for _ in range(continuations)]
        limits = RolloutLimits(**{**vars(self._limits), "max_turns": self._limits.max_turns - turn})
        ended = self._collect([(*s.prompt_ids, *s.completion_ids) for s in repeated], limits)
        rewards = self.rewards([s.question for s in repeated], ended)
        kept = [r * self._fits(s, t) for r, s, t in zip(rewards, repeated, ended, strict=True)]
        return torch.tensor(kept).view(len(states), continuations)

    def _fits(self, state: State, continuation: Trajectory) -> bool:
        """Whether it ends within the limit on whole trajectories: a longer one would have been cut without answer."""
        size = len(state.completion_ids) + sum(len(segment.token_ids) for segment in continuation.segments)
        return size <= self._limits.max_trajectory_tokens

    def _collect(self, prompts: Sequence[Sequence[int]], limits: RolloutLimits) -> list[Trajectory]:
        collector = Collector(self._tokenizer, self._search, PROTOCOL, limits)
        collected: list[Trajectory] = []
        for start in range(0, len(prompts), BATCH):
            engine = model_engine(self._model, self._end, SAMPLED)
            collected += collector.collect(prompts[start : start + BATCH], engine)
        return collected


def states_of(question: int, trajectory: Trajectory) -> list[State]:
    """The states in which its turns start."""
    states: list[State] = []
    completion: tuple[int, ...] = ()
    for segment in trajectory.segments:
        if isinstance(segment, Turn):
            states.append(State(question, len(states), trajectory.prompt_ids, completion))
        completion += segment.token_ids
    return states


def sample_of(trajectories: Sequence[Trajectory], rewards: Sequence[float]) -> Sample:
    """The tensors that a critic is trained on and judged by."""
    rows = assemble(trajectories)
    texts = [torch.tensor([*t.prompt_ids, *row.completion_ids]) for t, row in zip(trajectories, rows, strict=True)]
    starts = [
        torch.tensor([len(s.prompt_ids) + len(s.completion_ids) - 1 for s in states_of(0, t)]) for t in trajectories
    ]
    return sample_from(texts, starts, torch.tensor(rewards))


def sample_from(texts: Sequence[Tensor], starts: Sequence[Tensor], returns: Tensor) -> Sample:
    """From each trajectory's token ids and the indices of the tokens before its turns; returns are the targets."""
    before_turns = pad_sequence(list(starts), batch_first=True, padding_value=-1)
    return Sample(
        pad_sequence(list(texts), batch_first=True),
        torch.tensor([len(text) for text in texts]),
        before_turns,
        returns,
        returns.unsqueeze(1).expand(before_turns.shape),
    )


def joined(samples: Sequence[Sample]) -> Sample:
    """The trajectories of all, padded to the longest."""
    padding = {"input_ids": 0, "before_turns": -1, "targets": 0}

    def column(name: str) -> Tensor:
        tensors = [getattr(sample, name) for sample in samples]
        if name not in padding:
            return torch.cat(tensors)
        width = max(tensor.shape[1] for tensor in tensors)
        padded = [pad(tensor, (0, width - tensor.shape[1]), value=padding[name]) for tensor in tensors]
        return torch.cat(padded)

    return Sample(*(column(name) for name in vars(samples[0])))
