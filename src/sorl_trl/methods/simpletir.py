"""SimpleTIR's mask: trajectories with a void turn are not trained on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sorl_trl.methods.data import ScoredRollout
from sorl_trl.methods.method import GRPO, Method

__all__ = ["SIMPLETIR", "NotVoid"]


@dataclass(frozen=True)
class NotVoid:
    """Leave out trajectories with a turn that neither acts nor answers (SimpleTIR, arXiv 2509.02479).

    A penalty for invalid actions then has no effect, because the penalized trajectories are not trained on.
    """

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N,) bool.

        Raises:
            ValueError: The rollout does not record its turns' actions.
        """
        if rollout.void is None:
            raise ValueError(
                "`keep` has NotVoid, but the rollout does not record its turns' actions: use `SearchRollout`, "
                "`AgentRollout` or one that returns a `sorl_trl.types.Trajectory` per row, as `trajectory`."
            )
        return ~rollout.void


SIMPLETIR = Method(
    keep=(NotVoid(),),
    name="void",
    settings=GRPO.settings,
    source="SimpleTIR, arXiv 2509.02479, from public code",
)
