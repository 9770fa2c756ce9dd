"""SeeUPO: the turns of a rollout are updated one after the other, the last one first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor
from trl import GRPOTrainer

from sorl_trl.checks import Problem, raise_first
from sorl_trl.experimental.seeupo_ops import backward_turn_advantages
from sorl_trl.ops import turn_broadcast
from sorl_trl.rollout import RolloutLimits
from sorl_trl.trainers.agents.agent_rollout import AgentRollout
from sorl_trl.trainers.checks.trl_arguments import called_as, trainer_arguments
from sorl_trl.trainers.options.backward_rules import turn_limit_problems
from sorl_trl.trainers.paper import SEEUPO_PAPER
from sorl_trl.trainers.seeupo_config import SeeUPOConfig
from sorl_trl.trainers.so_grpo_trainer import SOGRPOTrainer
from sorl_trl.trainers.turns.backward import BackwardTurns
from sorl_trl.trainers.turns.recording import ScoredRollout, gather_rows, show_advantages


class SeeUPOTrainer(SOGRPOTrainer):
    """SeeUPO (arXiv 2602.06554, as it was reported to us) with the interface of `trl.GRPOTrainer`.

    For the last turn that a trajectory can have, then the one before it, down to the first: the log-probabilities of
    the turn are taken again under the policy as it is, and one pass over the rollout's minibatches trains the turn's
    tokens alone, with PPO's clip on the turn's geometric ratio. The advantage is what the trajectory earned, compared
    with all trajectories that have this turn (`backward_turn_advantages` says how that is biased), times the product M
    of the ratios of the turns that were updated before.

    Nothing is trained by a step on a turn that no trajectory has: its gradient is dropped, so that the optimizer does
    not move on by momentum. DeepSpeed and fp16's gradient scaler step all the same, with a gradient of 0.

    Per rollout it makes `num_iterations` passes with a gradient and as many without, one of which TRL makes as well:
    the pass after a turn's updates gives M's factor, and the old log-probabilities of the turn before it.

    Example:

    ```python
    trainer = SeeUPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=exact_match_reward,
        args=SeeUPOConfig(output_dir="out", num_iterations=3),  # `max_turns` 2, and the last generation
        train_dataset=dataset,
        rollout_func=SearchRollout(search),
    )
    trainer.train()
    ```

    Raises:
        TypeError: `args` is not a `SeeUPOConfig`.
        ValueError: `num_iterations` is not the most turns that a trajectory can have; a rollout has more; or what
            `SOGRPOTrainer` raises it for.
    """

    config_class: ClassVar[type[SeeUPOConfig]] = SeeUPOConfig
    args: SeeUPOConfig
    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "seeupo"]
    _name = "SeeUPO"
    _paper: ClassVar[dict[str, str]] = SEEUPO_PAPER

    @called_as(GRPOTrainer.__init__)
    def __init__(self, *positional: Any, **named: Any) -> None:
        given = trainer_arguments(*positional, **named)
        if isinstance(given.get("args"), SeeUPOConfig):
            raise_first(_limit_problems(given))
        super().__init__(**given)
        self._turns = BackwardTurns(self)
        self._observers.insert(0, self._turns)

    def _add_advantages(self, output: dict[str, Any], rollout: ScoredRollout) -> None:
        mask = rollout.turns.turn_mask & rollout.scored.unsqueeze(1)
        rewards = rollout.turn_rewards.sum(dim=1, keepdim=True)
        everywhere = gather_rows(self.accelerator, mask)
        if self.model.training:
            self._check_turns(everywhere.size(1))
        of_all = backward_turn_advantages(gather_rows(self.accelerator, rewards).squeeze(1), everywhere)
        first = self.accelerator.process_index * len(mask)
        advantages = of_all[first : first + len(mask), : mask.size(1)]
        output["advantages"] = turn_broadcast(advantages, output["turn_ids"])
        show_advantages(self, advantages, rollout.turns.turn_mask)
        self._turns.begin(output)

    def _check_turns(self, found: int) -> None:
        """Raise ValueError where trajectories of any rank have turns that no iteration would train."""
        if found > self.num_iterations:
            raise ValueError(
                f"`num_iterations` is {self.num_iterations}, but must be {found} or more: a trajectory has {found} "
                "turns, and SeeUPO trains one in each iteration."
            )

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)
        return self._turns.micro_batch(inputs) if self.model.training else inputs

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self._turns.is_absent and self.accelerator.scaler is None:
            self.model.zero_grad(set_to_none=True)  # what has no gradient, the optimizer leaves alone
        return loss


def _limit_problems(given: Mapping[str, Any]) -> Iterator[Problem]:
    """Whether `num_iterations` fits what limits the turns of a trajectory, where the arguments of a trainer say it."""
    args, rollout = given["args"], given.get("rollout_func")
    if isinstance(rollout, AgentRollout):
        most = (rollout.limits or RolloutLimits()).max_turns
        yield from turn_limit_problems(args.num_iterations, most + 1, f"`max_turns` {most}, and a last generation")
    elif rollout is None and not (given.get("tools") or given.get("environment_factory")):
        yield from turn_limit_problems(args.num_iterations, 1, "the trainer has no tools and no `rollout_func`")
    elif rollout is None:
        calls = args.max_tool_calling_iterations
        if calls is None:
            yield Problem(
                "max_tool_calling_iterations",
                "`max_tool_calling_iterations` is None, but SeeUPO needs a limit of turns: set it to "
                f"{args.num_iterations - 1}, `num_iterations` less 1, or both to others.",
                args.num_iterations - 1,
            )
        else:
            where = f"`max_tool_calling_iterations` {calls}, and the answer"
            yield from turn_limit_problems(args.num_iterations, calls + 1, where)
