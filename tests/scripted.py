"""Agents whose policy follows a script: how their calls continued, and what it has read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sorl_trl import EndpointRollout
from sorl_trl.agents.chat import RolloutSetup
from sorl_trl.rollout import Generation, LockStepEngine, RolloutLimits
from sorl_trl.rollout.engine import TurnEnd
from sorl_trl.trainers.sampled import check_rollout, sampled_rows

Say = Callable[[str, int], "str | Sequence[int]"]
"""What the policy says, as text or tokens, after what it has read, and after how many turns."""
ROOM = RolloutLimits(10**9, 512, 10**9, 10**9)


class ScriptedPolicy:
    """A generator that says what its script says, up to a stop string, and ends each message."""

    def __init__(self, tokenizer: Any, say: Say) -> None:
        self.tokenizer, self.say = tokenizer, say
        self.read: list[list[int]] = []
        """The contexts of its turns."""
        self._end = TurnEnd(tokenizer, (), [tokenizer.eos_token_id])

    def generate(
        self, contexts: Sequence[Sequence[int]], limits: Sequence[int], stops: Sequence[Sequence[str]] | None = None
    ) -> list[Generation]:
        own = stops or [()] * len(contexts)
        return [self._turn([*context], *given) for context, *given in zip(contexts, limits, own, strict=True)]

    def _turn(self, context: list[int], limit: int, stops: Sequence[str]) -> Generation:
        said = self.say(self.tokenizer.decode(context), len(self.read))
        self.read.append(context)
        ids = self.tokenizer.encode(said, add_special_tokens=False) if isinstance(said, str) else [*said]
        ids.append(self.tokenizer.eos_token_id)
        ends = (size for size in range(1, len(ids)) if self._end.reached([ids[:size]], [stops])[0])
        size = min(next(ends, len(ids)), limit)
        return Generation(tuple(ids[:size]), (-1.0,) * size, self._end.reached([ids[:size]], [stops])[0])


@dataclass(frozen=True)
class Ran:
    """An agent's run."""

    output: Mapping[str, Any]
    metrics: Mapping[str, float]
    policy: ScriptedPolicy

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many calls extended a context, were spliced to one, and began a new one."""
        extended, spliced, new = (
            int(self.metrics[f"endpoint/{kind}"]) for kind in ("extended", "spliced", "new_context")
        )
        return extended, spliced, new

    @property
    def read(self) -> list[str]:
        """What the policy has read before each turn."""
        return [self.policy.tokenizer.decode(context) for context in self.policy.read]

    @property
    def rewards(self) -> Any:
        return self.output["agent_rewards"][0]

    @property
    def trajectory(self) -> Any:
        return self.output["trajectory"][0]


def run_agent(
    agent: Any,
    example: Mapping[str, Any],
    tokenizer: Any,
    say: Say,
    limits: RolloutLimits = ROOM,
    engine: Any = LockStepEngine,
) -> Ran:
    """Run an agent once. What training reads before each turn must be what the policy has read."""
    policy = ScriptedPolicy(tokenizer, say)
    setup = RolloutSetup(tokenizer, None, {}, [tokenizer.eos_token_id], limits)
    output, metrics = EndpointRollout(agent).collect(setup, ["question"], [example], engine(policy))
    check_rollout(output, 1)
    keys = ("prompt_ids", "completion_ids", "env_mask", "turn_ids", "context_ids")
    (sampled,) = sampled_rows(*(output[key] for key in keys))
    assert [sampled.read_before(start) for start, _ in sampled.turns] == policy.read
    return Ran(output, metrics, policy)
