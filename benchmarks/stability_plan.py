"""What the stability benchmark compares: columns, each a way to train, and arms, each a method.

All arms run in this package's trainers, whose losses of GRPO and GSPO are TRL's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from examples.quickstart import LIMITS, ExpertNoise, WarmStartConfig

from benchmarks.worlds.hunt import HuntWorld
from benchmarks.worlds.mixture import WORLDS as MIXTURES
from benchmarks.worlds.questions import BenchmarkWorld, QuestionWorld
from benchmarks.worlds.working import HOPS, WorkingWorld
from sorl_trl.methods import METHODS, Clip, Method, MicroBatch, Objective, Ratio
from sorl_trl.ops import clipped_surrogate, is_clipped

GROUP = 8
"""Trajectories per prompt of the arms without a critic."""
PPO_SETTINGS = {
    "num_generations": 1,
    "critic": "model",
    "critic_learning_rate": 1e-3,
    "critic_warmup_steps": 8,
    "value_clip_range": None,
}
"""Of all arms with a critic; docs/how_to/critic.md explains why. The critic keeps its own learning rate."""

# -------------------------------------------------------------------------------------------------------------------
# Columns
# -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Regime:
    """A way to train, the same for all arms."""

    title: str
    description: str
    learning_rate: float
    world: BenchmarkWorld
    trajectories: int = 64
    """Per rollout."""
    minibatch: int = 16
    """Trajectories per update."""
    epochs: int = 2
    """How often each trajectory is used."""
    rollouts: int = 20
    staleness: int = 0
    """How many rollouts late each is trained on."""
    against_sampler: bool = False
    """Whether ratios compare with the engine's log-probabilities of its samples, not with the trainer's."""
    bf16: bool = False
    temperature: float = 1.0
    is_scored_greedily: bool = True

    @property
    def updates(self) -> int:
        """Per rollout."""
        return self.trajectories // self.minibatch * self.epochs


_LONG_LIMITS = replace(LIMITS, max_turns=5, max_trajectory_tokens=192)
"""Four hops and one spare search."""
_LONG_WARM_START = WarmStartConfig(
    noise=ExpertNoise(missing_keyword=0.1, wrong_keyword=0.1, half_name=0.05, early_answer=0.05), limits=_LONG_LIMITS
)
SHORT = QuestionWorld("Questions", "one hop or two, turns of four tokens")
LONG = QuestionWorld(
    "Long questions", "three hops or four, turns of four tokens", (0.0, 0.0, 0.5, 0.5), _LONG_LIMITS, _LONG_WARM_START
)
_32, _16 = "32 updates per rollout", "16 updates per rollout"


def _working(verbosity: int) -> Regime:
    """The same decisions at every verbosity. Rollouts and the questions that judge are fewer: long turns take time."""
    sizes = {"trajectories": 32, "minibatch": 8, "epochs": 4, "rollouts": 5}
    temperature = 0.7 if verbosity == 200 else 1.0  # a policy this small slips too often in 800 tokens
    title, text = f"Turns of {verbosity}", f"{_16}, {HOPS} hops"
    return Regime(title, text, 3e-4, WorkingWorld(verbosity), temperature=temperature, **sizes)


def _noisy(kind: str, title: str) -> Regime:
    """Ratios compare with the log-probabilities of an engine that computes otherwise than the trainer."""
    world = MIXTURES[kind]
    return Regime(title, f"{_16}, a mixture of experts", 3e-4, world, epochs=4, rollouts=12, against_sampler=True)


IN_LONG_TURNS = {f"turns-of-{verbosity}": _working(verbosity) for verbosity in (40, 80, 200)}
_COLUMNS = {
    "reuse": Regime("32 updates", _32, 1e-3, SHORT, epochs=8, rollouts=12),
    "long": Regime("More searches", f"{_32}, questions of 3 or 4 hops", 5e-4, LONG, epochs=8, rollouts=12),
    "hot": Regime("High rate", "8 updates per rollout", 2e-3, SHORT, trajectories=128, minibatch=32, rollouts=15),
    "stale": Regime(
        "Late", "8 updates per rollout, each up to 6 rollouts late", 1e-3, SHORT, rollouts=32, staleness=6
    ),
    "hunt-reuse": Regime("Hunts", f"{_32}, games of up to eight turns", 1e-3, HuntWorld(), epochs=8, rollouts=15),
    **IN_LONG_TURNS,
    **{
        f"{name}-times-3": replace(each, title=f"{each.title}, rate × 3", learning_rate=3 * each.learning_rate)
        for name, each in IN_LONG_TURNS.items()
    },
    "bfloat16": replace(_working(80), title="Turns of 80, bfloat16", bf16=True),
    "sampler-noise": _noisy("noise", "Router noise"),
    "sampler-bfloat16": _noisy("bfloat16", "bfloat16 sampler"),
}
COLUMNS = {name: replace(each, is_scored_greedily=False) for name, each in _COLUMNS.items()}

# -------------------------------------------------------------------------------------------------------------------
# Arms
# -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BenchmarkMethod:
    """One line of the tables.

    Args:
        title: in tables.
        method: what its trainer, that with a critic if it needs one, is given.
        is_searched: whether its learning rate, which is constant, is searched in each column.
        has_earlier_control: whether its learning rate follows the KL as in version 0.3.
        follows: the arm whose learning rate, update for update, is its own, of the same column and seed.
    """

    title: str
    method: Method
    is_searched: bool = False
    has_earlier_control: bool = False
    follows: str = ""


@dataclass(frozen=True)
class SequenceMin:
    """PPO's surrogate with the range .2 / n for a trajectory of n tokens: that of `sequence` in version 0.3."""

    epsilon: float = 0.2
    longest: int = 500

    def __call__(self, batch: MicroBatch) -> Objective:
        lengths = batch.loss_mask.sum(1, keepdim=True).clamp(1, self.longest)
        epsilon, ratio = self.epsilon / lengths.double(), batch.ratio
        value = clipped_surrogate(ratio, batch.advantages, epsilon, epsilon)
        return Objective(value, is_clipped(ratio.detach(), batch.advantages, epsilon, epsilon))


_SO_GRPO, _SO_PPO, _GRPO = (METHODS[name] for name in ("so_grpo", "so_ppo", "grpo"))
_GSPO = replace(_GRPO, ratio=Ratio("sequence"))
_AS_IN_03 = {"clip": Clip(0.1, by_length=False), "target_kl": 0.005}
_AT2PO = Method(clip=Clip(3e-3, 4e-3, by_length=False), target_kl=0.0)
_CONSTANT = replace(_SO_GRPO, target_kl=0.0)
ARMS: dict[str, BenchmarkMethod] = {
    "so_grpo": BenchmarkMethod("**SO-GRPO**", _SO_GRPO),
    "so_grpo_03": BenchmarkMethod("SO-GRPO of version 0.3", replace(_SO_GRPO, **_AS_IN_03), has_earlier_control=True),
    "sequence": BenchmarkMethod(
        "`sequence` of version 0.3",
        replace(_GSPO, surrogate=SequenceMin(), target_kl=0.005),
        has_earlier_control=True,
    ),
    "grpo_target": BenchmarkMethod("GRPO + our target KL", replace(_GRPO, target_kl=0.01)),
    "grpo": BenchmarkMethod("GRPO", _GRPO, is_searched=True),
    "gspo": BenchmarkMethod("GSPO", _GSPO, is_searched=True),
    "at2po": BenchmarkMethod("AT²PO's range", _AT2PO, is_searched=True),
    "so_grpo_constant": BenchmarkMethod("SO-GRPO, `target_kl=0`", _CONSTANT, is_searched=True),
    "yoked": BenchmarkMethod("SO-GRPO, yoked to itself", _CONSTANT, follows="so_grpo"),
    "so_ppo": BenchmarkMethod("**SO-PPO**", _SO_PPO),
    "so_ppo_03": BenchmarkMethod("SO-PPO of version 0.3", replace(_SO_PPO, **_AS_IN_03), has_earlier_control=True),
    "ppo_target": BenchmarkMethod("PPO + our target KL", replace(METHODS["ppo"], target_kl=0.01)),
}
FOLLOWING = ("so_grpo", "so_grpo_03", "sequence", "grpo_target")
"""Their learning rate follows the KL from that of the column."""
SEARCHED = tuple(name for name, arm in ARMS.items() if arm.is_searched)
WITH_CRITIC = ("so_ppo", "so_ppo_03", "ppo_target")
COLUMNS_WITH_CRITIC = ("reuse", "hunt-reuse", "turns-of-80")

# -------------------------------------------------------------------------------------------------------------------
# Seeds and learning rates
# -------------------------------------------------------------------------------------------------------------------

CHOOSING_SEEDS = (101, 105)
"""Choose learning rates. With 102 to 104 and 106 to 108, they have chosen everything else, and judge nothing."""
JUDGING_SEEDS = (401, 405, 402, 406, 403, 407, 404, 408)
"""In long turns, 401 to 404 start from one policy and 405 to 408 from another."""
GRID = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
FIRST_RATES = (3e-5, 1e-4, 3e-4, 1e-3)
"""Where an end of what has run is best, the next rate of the grid follows, up or down."""


def searched_in(column: str) -> str:
    """The column whose search, and whose runs of searched arms, a column shares."""
    return column.removesuffix("-times-3")
