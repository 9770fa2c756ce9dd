"""Records each update: its metrics (docs/reference/metrics.md), and the trajectories that `sorl view` shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase, TrainerCallback

from sorl_trl.methods import MicroBatch, Objective
from sorl_trl.ops import (
    effective_sample_size,
    importance_ratio,
    is_outside,
    kl_to_old,
    length_adjusted_kl,
    masked_mean,
    range_of_turns,
    turn_reduce,
    weight_sums,
)
from sorl_trl.records import trained
from sorl_trl.rollout.trajectories import decode, token_texts
from sorl_trl.trainers.batch import GENERATED_AT
from sorl_trl.trainers.config import TurnLevelConfig
from sorl_trl.trainers.host import Host
from sorl_trl.trainers.pack import Rollout
from sorl_trl.trainers.samples import Sample
from sorl_trl.types import StopReason, Trajectory

DETAILS = (
    *("turns/length", "turns/ratio_mean", "turns/ratio_min", "clip_fraction/", "clip_penalty_gate"),
    *(
        "effective_sample_size",
        "rollout/turns_",
        "rollout/contexts_",
        "rollout/neutralized_",
        "rollout/masked_",
        "rollout/truncated_",
    ),
    *("rollout/tokens_per_turn", "rollout/tokens_per_observation", "rollout/unique_", "rollout/passages_"),
    *("rollout/empty_", "rollout/seconds_"),
    *(f"rollout/stop_reason/{reason.value}" for reason in StopReason if reason is not StopReason.ANSWERED),
)
"""Metrics logged only with `log_turn_details`: a name, or a prefix of names that ends in "/" or "_"."""
ON_POLICY_CONSTANTS = ("off_policy_age", "clip_penalty", "lr_factor")
"""Metrics that are constant if each rollout is used for one update."""
_KLS = ("kl_moved", "kl_at_rest")
"""The fields of `UpdateKL`, which are not logged."""


class UpdateKL(NamedTuple):
    """Means of `length_adjusted_kl` over an update's trajectories; NaN where there are none."""

    moved: float = math.nan
    """Over those that the policy has been updated since."""
    at_rest: float = math.nan
    """Over the others: rounding, and the noise of the engine if ratios compare with it."""


class MetricSums:
    """The metrics of one micro-batch, as the numbers that processes exchange."""

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self.numbers: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor, keep: Tensor | None = None, kind: str = "mean") -> None:
        """Add the "mean", "min", "max", "share" or "overall" of the `values` where `keep` is true.

        Without `keep`, all but NaN count. A share is the effective sample size of importance ratios, and "overall" the
        mean, over all micro-batches.
        """
        values = values.detach()
        keep = ~values.isnan() if keep is None else keep.bool()
        self.kinds[name], self.numbers[name] = kind, _NUMBERS[kind](values, keep).float()


def _sum_and_count(values: Tensor, keep: Tensor) -> Tensor:
    return torch.stack([torch.where(keep, values, 0.0).sum().float(), keep.sum().float()])


def _least(values: Tensor, keep: Tensor) -> Tensor:
    """(1,) the minimum of the values to keep; infinity if there are none."""
    return pad(torch.where(keep, values, math.inf).flatten(), (0, 1), value=math.inf).min().view(1)


_NUMBERS = {
    "mean": _sum_and_count,
    "min": _least,
    "max": lambda values, keep: _least(-values, keep),
    "share": weight_sums,
    "overall": _sum_and_count,
}
"""The numbers that a micro-batch contributes to each kind of metric."""
_OVER_ALL: dict[str, Callable[[Tensor], Tensor]] = {
    "share": effective_sample_size,
    "overall": lambda sums: sums[0] / sums[1],
}
"""The kinds that have one value for all micro-batches, from the sum of their numbers; 0 / 0 is NaN."""


def reduce_all(sums: Sequence[MetricSums], accelerator: Accelerator) -> list[dict[str, float]]:
    """The metrics of each micro-batch over all processes, with one collective and one device synchronization.

    It is NaN, which TRL's averages skip, if nothing was kept. The last one also has the values over all of them. All
    processes must have the same metrics; so must all
    micro-batches, except for means.
    """
    kinds = {name: kind for each in sums for name, kind in each.kinds.items()}
    known = {name: numbers for each in sums for name, numbers in each.numbers.items()}
    filled = [[each.numbers.get(name, torch.zeros_like(numbers)) for name, numbers in known.items()] for each in sums]
    rows = torch.stack([torch.cat(numbers) for numbers in filled])
    gathered = accelerator.gather(rows.unsqueeze(0)).cpu()  # (processes, micro-batches, numbers)
    found: list[dict[str, float]] = [{} for _ in sums]
    widths = [len(numbers) for numbers in known.values()]
    for (name, kind), numbers in zip(kinds.items(), gathered.split(widths, dim=-1), strict=True):
        if kind in _OVER_ALL:
            found[-1][name] = _OVER_ALL[kind](numbers.sum((0, 1))).item()
            continue
        if kind == "mean":
            total, count = numbers.sum(0).unbind(-1)
            values = total / count  # 0 / 0 is NaN
        else:
            least = numbers.amin(0).squeeze(-1)
            values = least.masked_fill(least == math.inf, math.nan) * (-1 if kind == "max" else 1)
        for metrics, value in zip(found, values.tolist(), strict=True):
            metrics[name] = value
    return found


class MetricLog:
    """Adds a value per metric and micro-batch to TRL's lists, as TRL does.

    Values stay on the device until the optimizer steps. Then all processes exchange them, with one device
    synchronization each, however many micro-batches there were.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._waiting: list[MetricSums] = []
        """The metrics of each micro-batch since the last step."""

    def shorten(self) -> None:
        """Remove the metrics that are not to be logged."""
        args, metrics = self._host.args, self._host.metrics
        left_out = () if args.log_turn_details else DETAILS + ON_POLICY_CONSTANTS * args.is_on_policy
        families = tuple(name for name in left_out if name.endswith(("/", "_")))
        for name in [name for name in metrics if name in left_out or name.startswith(families)]:
            del metrics[name]

    def name_dataset(self, logs: Mapping[str, Any]) -> str:
        """Give metrics the name of the evaluation set in `logs`, and return it: TRL adds "eval_" alone."""
        prefix = next((key.removesuffix("runtime") for key in logs if key.endswith("_runtime")), "eval_")
        name, metrics = prefix.removeprefix("eval_"), self._host.metrics
        if prefix.startswith("eval_"):
            renamed = {name + key: values for key, values in metrics.items()}
            metrics.clear()
            metrics.update(renamed)
        return name

    def observe(self, batch: MicroBatch, objective: Objective, others: Mapping[str, Any]) -> UpdateKL:
        """Observe a micro-batch. If the optimizer steps after it, log all metrics since the last step.

        `others` are metrics of the loss and its terms: pairs of values and where to keep them, or a scalar. Returns
        the KL to the old policy of a completed update, over all its micro-batches and processes, else NaN.
        """
        sums = batch_metrics(batch)
        if objective.stopped is not None:
            add_clip_ratios(sums, batch, objective.stopped)
        for name, value in others.items():
            sums.add(name, *(value if isinstance(value, tuple) else (value,)))
        self._waiting.append(sums)
        logged = self._host.metrics
        if batch.age is not None:
            logged["off_policy_age"].append(batch.age)
        if not batch.ends_step:
            return UpdateKL()
        reduced = reduce_all(self._waiting, self._host.accelerator)
        self._waiting.clear()
        kl = UpdateKL(*(reduced[-1].pop(name) for name in _KLS))
        for name, value in (item for metrics in reduced for item in metrics.items()):
            logged[name].append(value)
        return kl


@torch.no_grad()
def batch_metrics(batch: MicroBatch) -> MetricSums:
    """The turn, ratio, clip and KL metrics of one micro-batch."""
    turns, log_ratio = batch.turns, batch.log_ratio.detach()
    low, high = (range_of_turns(side, turns) for side in batch.turn_range[:2])
    present = turns.turn_mask
    ratio = turn_reduce(importance_ratio(log_ratio, turns, "turn", batch.unit.average), turns)
    outside_tokens = is_outside(log_ratio.float().exp(), *batch.token_range[:2])
    sums = MetricSums()
    sums.add("turns/per_trajectory", present.float().sum(-1))
    sums.add("turns/length", turns.lengths.float(), present)
    sums.add("turns/ratio_mean", ratio, present)
    sums.add("turns/ratio_min", ratio, present, "min")
    sums.add("turns/ratio_max", ratio, present, "max")
    sums.add("clip_fraction/token", outside_tokens.float(), turns.loss_mask)
    sums.add("clip_fraction/turn", is_outside(ratio, low, high).float(), present)
    kl, has_turn = kl_to_old(log_ratio, turns.loss_mask, "unbiased"), turns.counts > 0
    sums.add("kl_to_old", kl, has_turn)
    for name, counts in zip(_KLS, (batch.has_moved, not batch.has_moved), strict=True):
        sums.add(name, length_adjusted_kl(kl, turns), has_turn & counts, "overall")
    sums.add("effective_sample_size", batch.ratio, turns.loss_mask, "share")
    return sums


@torch.no_grad()
def add_clip_ratios(sums: MetricSums, batch: MicroBatch, stopped: Tensor) -> None:
    """TRL's `clip_ratio/…`: the share of tokens whose gradient is stopped, (B, T) bool, on either side of 1.

    At the sequence level it is, as in TRL, the share of trajectories.
    """
    above = batch.ratio.detach() > 1
    low, high = (stopped & ~above).float(), (stopped & above).float()
    sums.add("clip_ratio/low_mean", *batch.per_unit(low))
    sums.add("clip_ratio/high_mean", *batch.per_unit(high))
    sums.add("clip_ratio/region_mean", *batch.per_unit(low + high))
    sums.add("clip_ratio/low_min", masked_mean(low, batch.loss_mask, dim=1), batch.turns.counts > 0, "min")
    sums.add("clip_ratio/high_max", masked_mean(high, batch.loss_mask, dim=1), batch.turns.counts > 0, "max")


# -------------------------------------------------------------------------------------------------------------------
# Trajectories, with each token's part in the loss
# -------------------------------------------------------------------------------------------------------------------

_ASKED = "asked"
"""Key of a batch: a list of what `_asked` returns, which TRL shuffles and splits as it does tensors."""


class TrajectoryDump(TrainerCallback):
    """Writes what a process trains on in every `save_trajectories_steps`-th optimizer step, when the step ends."""

    def __init__(self, args: TurnLevelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.args, self.tokenizer = args, tokenizer
        self._rows: list[trained.TrainedTrajectory] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Discard what an earlier run kept in memory, or wrote for steps that this run will repeat."""
        self._rows = []
        if self.args.save_trajectories_steps and state.is_local_process_zero:
            trained.discard_later(self.args.output_dir, state.global_step)

    def prepare(self, rollout: Rollout) -> None:
        """Add to a rollout's batch the facts about trajectories that its tensors lack."""
        if self.args.save_trajectories_steps:
            rewards = [None if math.isnan(total) else total for total in rollout.scored.totals().tolist()]
            places = rollout.own(torch.arange(len(rewards))).tolist()
            rollout.batch[_ASKED] = [
                _asked(sample) | _scored(rewards, place, rollout.scored.num_generations)
                for sample, place in zip(rollout.samples, places, strict=True)
            ]

    @torch.no_grad()
    def observe(self, batch: MicroBatch, objective: Objective) -> None:
        """Keep a micro-batch if its step is to be written, and write the step when it ends."""
        every = self.args.save_trajectories_steps
        # A batch from before a checkpoint may lack what `prepare` adds.
        if every and batch.step % every == 0 and batch.age is not None and _ASKED in batch.inputs:
            self._rows.extend(self._trained(batch, objective))
        if batch.is_training and batch.ends_step:
            if self._rows:
                trained.write_trained(self.args.output_dir, batch.step, self.args.process_index, self._rows)
            self._rows = []

    def _trained(self, batch: MicroBatch, objective: Objective) -> Iterator[trained.TrainedTrajectory]:
        inputs, log_ratio = batch.inputs, batch.log_ratio
        columns = {
            "turn_ids": batch.turns.turn_ids.tolist(),
            "token_ratios": log_ratio.float().exp().tolist(),
            "ratios": batch.ratio.float().tolist(),
            "advantages": batch.advantages.expand_as(log_ratio).float().tolist(),
            "clipped": _clip_states(batch, objective),
        }
        if "context_ids" in inputs:
            columns["context_ids"] = inputs["context_ids"].tolist()
        for i, asked in enumerate(inputs[_ASKED]):
            length = asked["tokens"]
            prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()].tolist()
            completion = inputs["completion_ids"][i][:length].tolist()
            per_token: dict[str, Any] = {name: tuple(rows[i][:length]) for name, rows in columns.items()}
            yield trained.TrainedTrajectory(
                step=batch.step,
                generated_at_step=int(inputs[GENERATED_AT]),
                prompt=decode(self.tokenizer, prompt),
                tokens=tuple(token_texts(self.tokenizer, completion)),
                **per_token,
                **{name: value for name, value in asked.items() if name != "tokens"},
            )


def _clip_states(batch: MicroBatch, objective: Objective) -> list[list[str]]:
    """For each token INSIDE, OUTSIDE, CLIPPED (outside the range, without a gradient) or UNTRAINED."""
    states = torch.zeros_like(batch.turns.turn_ids)
    states[is_outside(batch.ratio, *batch.clip_range[:2]) | batch.ratio.isnan()] = 1
    if objective.stopped is not None:
        states[objective.stopped] = 2
    states[~batch.loss_mask] = 3
    names = (trained.INSIDE, trained.OUTSIDE, trained.CLIPPED, trained.UNTRAINED)
    return [[names[state] for state in row] for row in states.tolist()]


def _scored(rewards: list[float | None], place: int, size: int) -> dict[str, Any]:
    """The reward of the trajectory at a place among those of all processes, and its group of `size` trajectories."""
    group = place // size
    return {"reward": rewards[place], "group": group, "group_rewards": rewards[group * size : (group + 1) * size]}


def _asked(sample: Sample) -> dict[str, Any]:
    """Facts about a trajectory that a batch's tensors lack, in types that a checkpoint can store.

    The columns of a training set may have any type, and a column of one of these names may mean something else.
    """
    example = sample.row
    question, golden = example.get("question"), example.get("golden_answers")
    answers = golden if isinstance(golden, Sequence) and not isinstance(golden, str) else [golden]
    found = example.get("trajectory")
    trajectory = found if isinstance(found, Trajectory) else None
    turns = trajectory.turns if trajectory else ()
    return {
        "tokens": len(sample.trajectory.completion_ids),
        "question": question if isinstance(question, str) else None,
        "golden_answers": [str(answer) for answer in answers if answer is not None],
        "answer": trajectory and trajectory.answer,
        "stop_reason": trajectory and trajectory.stop_reason.value,
        "actions": [turn.action.tool or turn.action.kind.value for turn in turns],
        "turn_rewards": [turn.reward for turn in turns],
        "roles": [reply.role if reply else "" for reply in trajectory.replies] if trajectory else [],
        "agents": sample.trajectory.agents,
    }
