"""SO-PPO in two CPU processes under DDP, FSDP2, ZeRO-2 and ZeRO-3 trains policy and critic as one process does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from sorl_trl import load_critic
from sorl_trl.trainers.critic import is_critic_name
from tests.agents import BY_THE_CLOCK
from tests.distributed.launch import launch
from tests.distributed.outcomes import assert_loads_plainly
from tests.distributed.ppo_cases import (
    ADAPTER,
    CLIPPED,
    HEAD,
    HEAD_LORA,
    KINDS,
    MODEL,
    RESUMED,
    SAVED_STEP,
    STARTED,
    STEPS,
    VARIANTS,
    PPOCase,
    PPOLaunch,
    build_trainer,
    cell,
    write_policy,
)

pytestmark = pytest.mark.distributed
PARTS = ("policy", "critic")
OFF, NON_REENTRANT, REENTRANT = "off", "non-reentrant", "reentrant"
SINGLE, HALF = "float32", "bfloat16"
EVERY_WAY = [cell(ADAPTER, checkpointing, SINGLE) for checkpointing in (OFF, NON_REENTRANT, REENTRANT)]
HALF_PRECISION = [cell(HEAD, OFF, HALF), cell(ADAPTER, OFF, HALF), cell(ADAPTER, REENTRANT, HALF)]
ZERO2 = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}
REFUSED = [
    replace(HEAD, name="own-optimizer", options={"deepspeed": {**ZERO2, "optimizer": {"type": "AdamW"}}}),
    replace(HEAD, name="own-scheduler", options={"deepspeed": {**ZERO2, "scheduler": {"type": "WarmupLR"}}}),
]

WHOLE = [*EVERY_WAY, *(cell(kind, OFF, SINGLE) for kind in KINDS if kind is not ADAPTER), *VARIANTS]
"""What every engine that does not partition weights trains."""
PARTITIONED = [
    *EVERY_WAY,
    *(cell(kind, how, SINGLE) for kind in (HEAD, MODEL) for how in (OFF, NON_REENTRANT, REENTRANT)),
    cell(HEAD_LORA, REENTRANT, SINGLE),
    *(case for case in VARIANTS if not case.name.endswith("/no-reference")),
    *(case for case in STARTED if case.kind in ("model-full", "adapter-lora")),
]
"""What FSDP2 and ZeRO-3 train, which takes five times as long: but each kind, and each thing that moves weights."""
TRAINED = {
    "ddp_cpu": [*WHOLE, *STARTED, *CLIPPED],
    "fsdp2_cpu": [*PARTITIONED, *HALF_PRECISION, *CLIPPED],
    "zero2_cpu": [*WHOLE, *HALF_PRECISION],
    "zero3_cpu": [*PARTITIONED, *HALF_PRECISION],
}
CONTINUED = {
    "ddp_cpu": RESUMED,
    "fsdp2_cpu": RESUMED,
    "zero2_cpu": RESUMED,
    "zero3_cpu": [case for case in RESUMED if case.kind in ("head-full", "model-full", "adapter-lora")],
}
OTHERS = {"ddp_cpu": [], "fsdp2_cpu": [], "zero2_cpu": [], "zero3_cpu": REFUSED}


def pairs(cases: dict[str, list[PPOCase]]) -> Any:
    """Parametrizes a test by engine and case."""
    deepspeed = [pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")]
    parameters = [
        pytest.param(
            config,
            case,
            id=f"{config.removesuffix('_cpu')}-{case.name}",
            marks=deepspeed if config.startswith("zero") else [],
        )
        for config, own in cases.items()
        for case in own
    ]
    return pytest.mark.parametrize(("config", "case"), parameters)


@dataclass(frozen=True)
class Run:
    """Logs, and the weights of policy and critic at both ends."""

    logs: list[dict[str, Any]]
    start: dict[str, dict[str, Tensor]]
    end: dict[str, dict[str, Tensor]]


class SingleProcess:
    """Runs in this process, in float32, one micro-batch and without gradient checkpointing: all others must agree.

    Args:
        folder: takes `policy/` and, of each kind of critic, a trained one below `start/`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: dict[str, Run] = {}
        write_policy(folder / "policy")
        for case in KINDS:
            self._train(replace(case, name=f"start/{case.kind}", options={"save_strategy": "steps"}))

    def run(self, case: PPOCase) -> Run:
        """The run that `case` has to agree with."""
        case = replace(case, name="alone", checkpointing="off", dtype="float32", micro_batches=1, is_resumed=False)
        key = str(asdict(case))
        if key not in self._runs:
            self._runs[key] = self._train(case)
        return self._runs[key]

    def _train(self, case: PPOCase) -> Run:
        trainer = build_trainer(case, self.folder)
        start = parts(trainer.model)
        trainer.train()
        return Run(trainer.state.log_history, start, parts(trainer.model))


def parts(model: Any) -> dict[str, dict[str, Tensor]]:
    """Copies of the weights of policy and critic."""
    weights: dict[str, dict[str, Tensor]] = {part: {} for part in PARTS}
    for name, weight in model.state_dict().items():
        weights["critic" if is_critic_name(name) else "policy"][name] = weight.clone()
    return weights


class Launch:
    """Cases under an engine, trained in one launch in a folder of their own.

    Args:
        config: one of `ENGINES`.
        cases: of different names.
        alone: what they start from.
        name: of the folder; by default, the engine's.
    """

    def __init__(self, config: str, cases: list[PPOCase], alone: SingleProcess, name: str | None = None) -> None:
        self.folder = alone.folder / (name or config)
        self.folder.mkdir()
        for shared in ("policy", "start"):
            (self.folder / shared).symlink_to(alone.folder / shared)
        timeout_s = 60.0 + 20.0 * len(cases)
        self.results = launch(config, PPOLaunch(str(self.folder), cases), timeout_s, "tests.distributed.ppo_worker")

    def weights(self, name: str) -> dict[str, dict[str, Tensor]]:
        """What the run `name` ended with, or "{name}/resumed"."""
        return {part: torch.load(self.folder / name / f"{part}.pt") for part in PARTS}


def distance(weights: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The largest difference of two weights of one name."""
    _check_names(weights, others)
    return max(float((weight - others[name]).abs().max()) for name, weight in weights.items())


def relative_distance(weights: dict[str, Tensor], end: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """‖weights - end‖₂ / ‖end - start‖₂: the error as a share of what was learned."""
    _check_names(weights, end)
    error, learned = (
        sum(float((a[name] - b[name]).square().sum()) for name in end) for a, b in ((weights, end), (end, start))
    )
    return (error / learned) ** 0.5


def _check_names(weights: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert weights.keys() == others.keys(), sorted(weights.keys() ^ others.keys())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> SingleProcess:
    return SingleProcess(tmp_path_factory.mktemp("ppo"))


Launches = Callable[[str], Launch]


@pytest.fixture(scope="module")
def launches(alone: SingleProcess) -> Launches:
    """The launch of each engine, once it is asked for; one that failed is not tried again: its folder is there."""
    return cache(lambda config: Launch(config, [*TRAINED[config], *CONTINUED[config], *OTHERS[config]], alone))


def assert_as_alone(launched: Launch, case: PPOCase, run: Run) -> None:
    """bfloat16 keeps eight bits: what it learned differs by some hundredths from what float32 learned."""
    weights = launched.weights(case.name)
    for part in PARTS:
        if case.dtype == "bfloat16":
            assert relative_distance(weights[part], run.end[part], run.start[part]) < 0.1, part
        else:
            assert distance(weights[part], run.end[part]) < 2e-5, part
    logs = launched.results[case.name]["logs"]
    for ours, theirs in zip(logs[:STEPS], run.logs[:STEPS], strict=True):
        if "critic/grad_norm" not in ours:  # DeepSpeed has the norm over both
            theirs = {**theirs, "grad_norm": math.hypot(theirs["grad_norm"], theirs["critic/grad_norm"])}
            del theirs["critic/grad_norm"]
        compared = [name for name in ours.keys() | theirs.keys() if is_same_anywhere(name)]
        tolerance = 0.1 if case.dtype == "bfloat16" else 2e-5
        assert {name: ours.get(name) for name in compared} == pytest.approx(
            {name: theirs.get(name) for name in compared}, abs=tolerance, nan_ok=True
        )


def is_same_anywhere(name: str) -> bool:
    """Means over trajectories or whole rollouts; others depend on which trajectories share a micro-batch."""
    names = ("loss", "grad_norm", "learning_rate", "reward", "kl_to_old", "clip_penalty")
    return (
        name in names or name.startswith(("critic/", "advantages/", "completions/"))
    ) and name != "critic/value_clip_fraction"


def assert_learned(case: PPOCase, run: Run) -> None:
    """The comparison is worth something: policy and critic moved, and no metric is what it is without a critic."""
    assert distance(run.start["policy"], run.end["policy"]) > 1e-3
    for part in {"head": ["head."], "adapter": ["head.", "lora_A", "lora_B"], "model": ["head.", "backbone."]}[
        case.critic
    ]:
        moved = [name for name in run.end["critic"] if part in name]
        assert (
            distance(*({name: weights["critic"][name] for name in moved} for weights in (run.start, run.end))) > 1e-3
        )
    second_rollout = run.logs[2]
    for name in (
        "critic/explained_variance",
        "critic/value_mean",
        "critic/value_loss",
        "advantages/mean",
        "grad_norm",
    ):
        assert math.isfinite(second_rollout[name]) and abs(second_rollout[name]) > 1e-5, name  # above what rounds


@pytest.mark.launch
def test_ddp_trains_as_one_process(alone: SingleProcess) -> None:
    """The one launch of every test run: the adapter, whose gradient checkpointing is the most intricate."""
    case = replace(cell(ADAPTER, REENTRANT, SINGLE), name="quick")
    assert_as_alone(Launch("ddp_cpu", [case], alone, name="quick"), case, alone.run(case))


@pairs(TRAINED)
def test_trains_as_one_process(alone: SingleProcess, launches: Launches, config: str, case: PPOCase) -> None:
    """With the gradient checkpointing asked for, but for PEFT under ZeRO-3, where TRL makes it reentrant."""
    run = alone.run(case)
    assert_learned(case, run)
    assert_as_alone(launches(config), case, run)
    forced = config == "zero3_cpu" and case.lora and case.checkpointing == NON_REENTRANT
    expected = {OFF: None, NON_REENTRANT: forced, REENTRANT: True}[case.checkpointing]
    assert launches(config).results[case.name]["reentrant"] is expected


class TestCheckpoints:
    @pairs(CONTINUED)
    def test_goes_on(self, alone: SingleProcess, launches: Launches, config: str, case: PPOCase) -> None:
        """Two steps, a checkpoint and two more in another trainer are four steps, to the last bit."""
        launched = launches(config)
        weights, resumed = launched.weights(case.name), launched.weights(f"{case.name}/resumed")
        run = alone.run(case)
        for part in PARTS:
            assert distance(weights[part], resumed[part]) == 0, part
            assert distance(weights[part], run.end[part]) < 2e-5, part
        result = launched.results[case.name]
        for ours, theirs in zip(
            result["logs"][SAVED_STEP:STEPS], result["resumed_logs"][SAVED_STEP:STEPS], strict=True
        ):
            names = [name for name in ours if not name.startswith(BY_THE_CLOCK)]
            assert {name: theirs[name] for name in names} == pytest.approx(
                {name: ours[name] for name in names}, rel=0, abs=0, nan_ok=True
            )

    @pairs(CONTINUED)
    def test_policy_and_critic_are_apart(self, launches: Launches, config: str, case: PPOCase) -> None:
        """The policy has no trace of the critic, and the critic loads alone; without it, the run does not go on."""
        launched = launches(config)
        assert "There is no critic in" in launched.results[case.name]["refused"]
        checkpoint = final_checkpoint(launched, case)
        names = [name for path in checkpoint.glob("*.safetensors") for name in safe_open(path, "pt").keys()]  # noqa: SIM118
        assert names and not any("critic" in name for name in names)
        critics = [path.name for path in checkpoint.rglob("*") if "critic" in path.name]
        assert critics == ["critic", "critic_config.json"]
        assert not any("critic" in path.read_text() for path in checkpoint.glob("*config.json"))
        trained, loaded = launched.weights(case.name)["critic"], load_critic(checkpoint).state_dict()
        assert distance(trained, {name: loaded[loaded_name(name)] for name in trained}) == 0

    @pytest.mark.parametrize("config", CONTINUED)
    def test_policies_load_plainly(self, launches: Launches, config: str) -> None:
        launched = launches(config)
        pairs = {final_checkpoint(launched, c): launched.folder / c.name / "policy.pt" for c in CONTINUED[config]}
        assert_loads_plainly(pairs)


def final_checkpoint(launched: Launch, case: PPOCase) -> Path:
    return launched.folder / case.name / f"checkpoint-{STEPS}"


def loaded_name(trained: str) -> str:
    """What `load_critic` calls a weight that is trained as `trained`."""
    name = trained.removeprefix("base_model.model.")
    if name.startswith("critic."):
        return name.removeprefix("critic.")
    return name.replace("model.", "backbone.", 1).replace(".critic.", ".default.")


@pairs({"zero3_cpu": REFUSED})
def test_deepspeed_builds_neither_optimizer_nor_scheduler(launches: Launches, config: str, case: PPOCase) -> None:
    name = case.name.removeprefix("own-")
    assert f"The DeepSpeed configuration has '{name}'" in launches(config).results[case.name]["refused"]
