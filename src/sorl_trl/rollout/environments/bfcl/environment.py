"""A task of the leaderboard as an environment: a user who speaks again, and worlds that answer calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from sorl_trl.rollout.environments.bfcl.tasks import Task, request_of, task_of
from sorl_trl.rollout.environments.bfcl.worlds import Function, Worlds
from sorl_trl.rollout.environments.environment import Reply
from sorl_trl.rollout.environments.function_calls import Call, WrongCall, read_calls
from sorl_trl.types import StopReason, Turn

Prompt: TypeAlias = "Sequence[Mapping[str, str]]"
MOST_SHOWN = 200_000
"""Characters of what a call returns."""
MOST_STEPS = 20
"""Messages with calls that the leaderboard allows between two of the user's."""
ERRORS = (
    "wrong_call",
    "failed_call",
    "empty_turn_model_response",
    "instance_state_mismatch",
    "execution_response_mismatch",
    "force_terminated",
)
"""What can go wrong: a `wrong_call` cannot be read, or is of no function; a `failed_call` makes the world raise; the
others are the leaderboard's verdicts."""


class BFCLEnvironment:
    """The world of one trajectory, for an `EnvironmentResponder` and a `ChatProtocol`.

    A message that calls functions is answered by their results, one that calls none by what the user says next.
    Whatever is wrong with a call is part of the answer. When a request has been served, the leaderboard's check is
    made: every world is in the state that the task's solution leads to, and what its calls return has been returned.
    The message that ends a request gets the reward 1 / number of requests where the check passes, else 0.

    Args:
        compact: How functions are described that a later request brings: see `prompt_rows`.
        tools: Functions of other origin that may be called too.
        most_steps: Messages with calls for one request; one more ends the trajectory, and the task has failed.
    """

    def __init__(self, compact: bool = False, tools: Sequence[Function] = (), most_steps: int = MOST_STEPS) -> None:
        self._compact, self._tools, self._most_steps = compact, tools, most_steps

    def reset(self, prompt: Prompt) -> None:
        """Begin the task whose prompt `prompt_rows` has made."""
        if "task" not in prompt[0]:
            raise ValueError("prompt names no task: `prompt_rows` makes prompts whose first message does")
        self.task: Task = task_of(prompt[0]["task"])
        self._worlds, self._solved_worlds = Worlds(self.task, self._tools), Worlds(self.task)
        self._results: Counter[int] = Counter()
        """Hashes of what all calls of the policy so far have returned."""
        self._steps = self._read = 0
        """Messages that called something since the user has spoken, and calls that could be read."""
        self.verdicts: list[str | None] = []
        """What is wrong, in the leaderboard's words, with each request that has been served; None where it passed."""
        self.calls = 0
        self.errors: Counter[str] = Counter()
        """What else went wrong, by kind."""

    @property
    def solved(self) -> bool:
        """Whether all requests have been served, and every check has passed."""
        return self.verdicts == [None] * len(self.task.requests)

    def measures(self) -> dict[str, float]:
        """Figures of the trajectory, by name."""
        requests = len(self.task.requests)
        errors = self.errors + Counter(filter(None, self.verdicts))
        return {
            "solved": float(self.solved),
            "requests_solved": self.verdicts.count(None) / requests,
            "calls_per_request": self.calls / requests,
            **{kind: float(errors[kind]) for kind in ERRORS},
        }

    def step(self, turn: Turn) -> Reply:
        """Answer a message."""
        results = self.answers(turn.action.content)
        if self._steps > self._most_steps:
            self.errors["force_terminated"] += 1
            return Reply(stop=StopReason.ENVIRONMENT_DONE)
        if results:
            return Reply("\n".join(results))
        reward, request = self.serve(), self.next_request()
        if request is None:
            return Reply(reward=reward, stop=StopReason.ENVIRONMENT_DONE)
        return Reply(request, reward=reward, role="user")

    def answers(self, message: str) -> list[str]:
        """What the calls of a message return; nothing where it makes none."""
        try:
            results = [self.call(call) for call in read_calls(message)]
        except WrongCall as error:
            results = [self._wrong(error)]
        self._steps += bool(results)
        return results

    def call(self, call: Call) -> str:
        """Make a call; what it returns, or what is wrong with it."""
        self.calls += 1
        self._read += 1
        try:
            result = self._worlds.call(call)
        except WrongCall as error:
            return self._wrong(error)
        if result.startswith("Error during execution"):
            self.errors["failed_call"] += 1
        self._results[hash(result)] += 1
        return result[:MOST_SHOWN]

    def serve(self) -> float:
        """End the request that is being served, with the leaderboard's check; its reward."""
        solution = self.task.solution[len(self.verdicts)]
        results = [self._solved_worlds.call(call) for text in solution for call in read_calls(text)]
        self.verdicts.append(self._verdict(results) if solution else None)
        self._steps = self._read = 0
        return float(self.verdicts[-1] is None) / len(self.task.requests)

    def next_request(self) -> str | None:
        """What the user says next; None where all requests have been served."""
        number = len(self.verdicts)
        return None if number == len(self.task.requests) else request_of(self.task, number, self._compact)

    def _wrong(self, error: WrongCall) -> str:
        self.errors["wrong_call"] += 1
        return f"Error: {error}"

    def _verdict(self, results: Sequence[str]) -> str | None:
        """What is wrong with a request that had to be served by calls with these results."""
        if not self._read:
            return "empty_turn_model_response"
        if not self._worlds.equals(self._solved_worlds):
            return "instance_state_mismatch"
        missing = Counter(map(hash, results)) - self._results
        return "execution_response_mismatch" if missing else None


class BFCLTools:
    """The same for TRL's own `environment_factory`, where nobody speaks but tools: `done` brings the next request.

    How many calls there may be, TRL's `max_tool_calling_iterations` says. For `compact`, see `BFCLEnvironment`.
    """

    def __init__(self, compact: bool = False) -> None:
        self._compact = compact

    def reset(self, prompt: Prompt, **_: Any) -> None:
        """Begin the task whose prompt `prompt_rows` has made."""
        self._environment = BFCLEnvironment(self._compact)
        self._environment.reset(prompt)

    def call(self, calls: str) -> str:
        """
        Call functions.

        Args:
            calls: A list of calls, such as "[f(a=1), g(b='x')]".

        Returns:
            What each returns, a line each.
        """
        return "\n".join(self._environment.answers(calls)) or "there is no call in that"

    def done(self) -> str:
        """
        Say that all has been done that the user asked for.

        Returns:
            What the user asks for next.
        """
        environment = self._environment
        if environment.next_request() is not None:
            environment.serve()
        return environment.next_request() or "That was all, thank you."

    @property
    def solved(self) -> bool:
        """See `BFCLEnvironment.solved`."""
        return self._environment.solved

    def get_reward(self) -> float:
        """The share of requests that have been served well."""
        return self._environment.measures()["requests_solved"]
