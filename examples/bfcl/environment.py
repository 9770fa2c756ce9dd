"""A task of the leaderboard as an environment: the user makes several requests, and worlds answer the calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from examples.bfcl.calls import Call, WrongCall, read_calls
from examples.bfcl.tasks import Task, request_of, task_of
from examples.bfcl.worlds import Worlds
from sorl_trl.rollout import ChatProtocol, Reply
from sorl_trl.types import StopReason, Turn

MOST_SHOWN = 200_000
"""How many characters of a call's result the policy reads at most."""
MOST_STEPS = 20
"""How many messages with calls the leaderboard allows for one request."""
ERRORS = (
    "wrong_call",
    "failed_call",
    "empty_turn_model_response",
    "instance_state_mismatch",
    "execution_response_mismatch",
    "force_terminated",
)
"""What can go wrong. A `wrong_call` cannot be read or names no function; a `failed_call` makes the world raise an
error; the others are the leaderboard's verdicts."""


class BFCLEnvironment:
    """The environment of one trajectory: `environment: examples.bfcl.environment.BFCLEnvironment` in a recipe.

    A message with calls is answered by their results or by what is wrong with them, a message without calls by the
    user's next request. When the policy ends a request, the leaderboard's check is applied: every world must be in the
    state to which the task's solution leads, and all that the solution's calls return must have been returned. The
    message that ends a request gets the reward 1 / number of requests if the check passes, and 0 otherwise.
    """

    protocol = ChatProtocol()
    """A turn is a whole message."""
    most_steps = MOST_STEPS
    """How many messages with calls one request allows. One more ends the trajectory as a failure."""

    def reset(self, task: str, compact: bool = False) -> None:
        """Begin a task, by its id. For `compact`, see `rows_of`. Both are columns of the rows."""
        self._compact = compact
        self.task: Task = task_of(task)
        self._worlds, self._solved_worlds = Worlds(self.task), Worlds(self.task)
        self._results: Counter[int] = Counter()
        """Hashes of all results that the policy's calls have returned so far."""
        self._steps = self._read = 0
        """How many messages had calls, and how many calls could be read, since the user last spoke."""
        self.verdicts: list[str | None] = []
        """For each request that has ended, the leaderboard's name for what is wrong; None if it passed."""
        self.calls = 0
        self.errors: Counter[str] = Counter()
        """How often other things went wrong, by kind."""

    @property
    def solved(self) -> bool:
        """Whether all requests have ended and every check has passed."""
        return self.verdicts == [None] * len(self.task.requests)

    def measures(self) -> dict[str, float]:
        """Metrics of the trajectory, by name; for each world of the task, whether it was solved."""
        requests = len(self.task.requests)
        errors = self.errors + Counter(filter(None, self.verdicts))
        return {
            "solved": float(self.solved),
            **{f"solved_in_{world}": float(self.solved) for world in self.task.worlds},
            "requests_solved": self.verdicts.count(None) / requests,
            "calls_per_request": self.calls / requests,
            **{kind: float(errors[kind]) for kind in ERRORS},
        }

    def step(self, turn: Turn) -> Reply:
        results = self.answers(turn.action.content)
        if self._steps > self.most_steps:
            self.errors["force_terminated"] += 1
            return Reply(stop=StopReason.ENVIRONMENT_DONE)
        if results:
            return Reply("\n".join(results))
        reward, request = self.serve(), self.next_request()
        if request is None:
            return Reply(reward=reward, stop=StopReason.ENVIRONMENT_DONE)
        return Reply(request, reward=reward, role="user")

    def answers(self, message: str) -> list[str]:
        """Make the calls of a message, and return their results; an empty list if there is no call."""
        try:
            results = [self.call(call) for call in read_calls(message)]
        except WrongCall as error:
            results = [self._wrong(error)]
        self._steps += bool(results)
        return results

    def call(self, call: Call) -> str:
        """Make a call, and return its result or what is wrong with it."""
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
        """End the current request with the leaderboard's check, and return its reward."""
        solution = self.task.solution[len(self.verdicts)]
        results = [self._solved_worlds.call(call) for text in solution for call in read_calls(text)]
        self.verdicts.append(self._verdict(results) if solution else None)
        self._steps = self._read = 0
        return float(self.verdicts[-1] is None) / len(self.task.requests)

    def next_request(self) -> str | None:
        """What the user says next; None if no request is left."""
        number = len(self.verdicts)
        return None if number == len(self.task.requests) else request_of(self.task, number, self._compact)

    def _wrong(self, error: WrongCall) -> str:
        self.errors["wrong_call"] += 1
        return f"Error: {error}"

    def _verdict(self, results: Sequence[str]) -> str | None:
        """What is wrong with the current request, whose solution's calls return `results`; None if nothing is."""
        if not self._read:
            return "empty_turn_model_response"
        if not self._worlds.equals(self._solved_worlds):
            return "instance_state_mismatch"
        missing = Counter(map(hash, results)) - self._results
        return "execution_response_mismatch" if missing else None


class BFCLTools:
    """The same task for TRL's `environment_factory`, where only tools reply: `done` returns the next request.

    TRL's `max_tool_calling_iterations` limits the number of calls.
    """

    def reset(self, task: str, compact: bool = False, **_: Any) -> None:
        """Begin a task, by its id. For `compact`, see `rows_of`."""
        self._environment = BFCLEnvironment()
        self._environment.reset(task, compact)

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
        """The share of requests that have passed their check."""
        return self._environment.measures()["requests_solved"]
