"""Who solves the leaderboard's tasks: the calls that solve them, word for word."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from examples.bfcl.environment import BFCLEnvironment
from examples.bfcl.tasks import Task, rows_of
from examples.quickstart.imitation import Example, example_of
from sorl_trl.qa import encode_prompts
from sorl_trl.rollout import (
    ChatProtocol,
    Collector,
    EnvironmentResponder,
    Generation,
    RolloutLimits,
)

DONE = "Done."


class SolutionPolicy:
    """A `Generator` that serves each request with one message of the calls that solve it, and reports that it is done.

    Args:
        tokenizer: With the chat template in which prompts are asked.
        tasks: What it will be asked.
        compact: How: see `rows_of`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task], compact: bool = False) -> None:
        self._tokenizer = tokenizer
        self.prompts = encode_prompts(tokenizer, rows_of(tasks, compact))
        # A shortened task may be the beginning of another, with the same prompt.
        by_length = sorted(zip(map(tuple, self.prompts), tasks, strict=True), key=lambda each: len(each[1].requests))
        self._messages = {prompt: solution_messages(task) for prompt, task in by_length}

    def generate(self, contexts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> list[Generation]:
        """See `Generator.generate`."""
        return [self._generate(context, most) for context, most in zip(contexts, max_new_tokens, strict=True)]

    def _generate(self, context: Sequence[int], most: int) -> Generation:
        prompt = next(prompt for prompt in self._messages if tuple(context[: len(prompt)]) == prompt)
        ends = list(context[len(prompt) :]).count(self._tokenizer.eos_token_id)  # of its messages and of the others'
        message = self._messages[prompt][ends // 2]
        ids = (*self._tokenizer.encode(message, add_special_tokens=False), self._tokenizer.eos_token_id)
        return Generation(ids[:most], None, stopped=len(ids) <= most)


def solved_examples(
    tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task], limits: RolloutLimits, compact: bool = False
) -> list[Example]:
    """What a policy would have read and written, had it solved the tasks as the leaderboard does."""
    policy = SolutionPolicy(tokenizer, tasks, compact)
    collector = Collector(tokenizer, EnvironmentResponder(BFCLEnvironment), ChatProtocol().in_chat(tokenizer), limits)
    trajectories = collector.collect(policy.prompts, policy, examples=rows_of(tasks, compact))
    return [
        example_of(trajectory.prompt_ids, trajectory.completion_ids, trajectory.env_mask)
        for trajectory in trajectories
    ]


def solution_messages(task: Task) -> list[str]:
    """For each request the calls that solve it, if there are any, and that it is done."""
    made = (([f"[{', '.join(calls)}]"] if calls else []) + [DONE] for calls in task.solution)
    return [message for messages in made for message in messages]
