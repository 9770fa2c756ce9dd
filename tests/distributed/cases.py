"""What is trained, in one process or two: the same trajectories, rewards and optimizer steps in both."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from examples.information_gain import InformationGain
from openai import OpenAI
from peft import LoraConfig
from transformers import AutoTokenizer

from sorl_trl import EndpointRollout, SearchRollout, SOGRPOConfig, SOGRPOTrainer
from sorl_trl.diagnostics.callbacks import CollapseGuard
from sorl_trl.diagnostics.collapse import Rule, level
from sorl_trl.experimental import GroupRefillTrainer
from sorl_trl.search import BM25Index, SearchArguments
from tests.agents import LIMITS, PROTOCOL, agent_policy, agent_tokenizer, questions, teach
from tests.trajectories import FixedRollout, parity_reward, prompts, turn_reward

# The greedy policy answers the first question at once, and searches twice for the second.
SCRIPTS = (
    "where rome <answer> rome </answer>",
    "where oslo <search> oslo </search> <information> where oslo </information> "
    "<search> bern </search> <information> where bern </information> <answer> bern </answer>",
)
BATCH_SIZE = {"fixed": 24, "search": 8, "endpoint": 8}
"""Trajectories per rollout and per optimizer step, over all processes."""
NUM_GENERATIONS = {"fixed": 8, "search": 4, "endpoint": 4}
"""Of "fixed", the middle one of three groups lies on both ranks; of the others, each rank has one question's."""

ENGINES: dict[str, dict[str, Any]] = {
    "ddp_cpu": {"processes": 2, "engine": "DistributedDataParallel", "zero_stage": 0, "partitioned": False},
    "zero1_cpu": {"processes": 2, "engine": "DeepSpeedEngine", "zero_stage": 1, "partitioned": False},
    "zero2_cpu": {"processes": 2, "engine": "DeepSpeedEngine", "zero_stage": 2, "partitioned": False},
    "zero3_cpu": {"processes": 2, "engine": "DeepSpeedEngine", "zero_stage": 3, "partitioned": True},
}
ENGINES["fsdp2_cpu"] = {"processes": 2, "engine": "FSDP2", "zero_stage": 0, "partitioned": True}
ENGINES["ddp_two_machines_cpu"] = {**ENGINES["ddp_cpu"], "machines": 2}
ENGINES["zero3_two_machines_cpu"] = {**ENGINES["zero3_cpu"], "machines": 2}
"""What a run under each of `accelerate_configs/` must turn out to be."""


@dataclass(frozen=True)
class Case:
    """One training run. It travels to the worker as JSON."""

    folder: str
    """Holds `policy/`, and `index/` for "search"; takes `output/` and the results."""
    rollout: str = "fixed"
    """Source of the trajectories. "fixed": given; "search": the collector with a policy that was taught `SCRIPTS`;
    "endpoint": an agent that asks it one question once, and the other three times, the last time as a sub-agent."""
    lora: bool = False
    turn_rewards: bool = False
    agreeing: bool = False
    """Whether the trajectories of every other prompt have equal rewards."""
    refill: bool = False
    """Whether groups without a spread are asked again with other prompts."""
    gain: bool = False
    """Whether the information gain of turns is a reward too; the prompt is as good a golden answer as any."""
    stopped: bool = False
    """Whether a `CollapseGuard` stops the run when its first rollout has been trained on."""
    micro_batches: int = 2
    method: dict[str, Any] | None = None
    """As a recipe has it."""
    no_baseline: bool = False
    """Whether turns are credited with what they earn: no trajectory of a greedy policy is better than its group."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further fields of the trainer's config."""
    search_url: str = ""
    """Of a server that "search" asks; without one, each process opens `index/`."""


class UnevenRollout(FixedRollout):
    """The first half of a batch takes one turn, the second half up to four: of two ranks, each has a half."""

    def _trajectory(self, index: int) -> tuple[list[int], list[int]]:
        self.max_turns = 1 if index % 10_000 < BATCH_SIZE["fixed"] // 2 else 4
        return super()._trajectory(index)


class Routed(UnevenRollout):
    """Returns as the engine's routes experts that are known from a token and its place."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        texts = [[*p, *ids] for p, ids in zip(output["prompt_ids"], output["completion_ids"], strict=True)]
        firsts = [[[token + place, token] for place, token in enumerate(text)] for text in texts]
        return {**output, "routes": [(np.array(rows)[..., None] + [0, 1]) % 4 for rows in firsts]}


def record_turns(trainer: Any) -> list[int]:
    """The most turns that a trajectory of this rank has, in each rollout from now on."""
    turns, sample = list[int](), trainer._sample

    def recorded(rows: list[Any]) -> Any:
        samples, scored = sample(rows)
        turns.append(max(len(each.trajectory.spans) for each in samples))
        return samples, scored

    trainer._sample = recorded
    return turns


def calls_of_two_lengths(example: dict[str, Any], endpoint: Any) -> None:
    """A plain function, in a thread of its own."""
    chat = OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key).chat.completions
    messages: list[Any] = [{"role": "user", "content": example["prompt"]}]
    for limit in (4, 6)[: 1 + ("oslo" in example["prompt"])]:
        reply = chat.create(model="planner", messages=messages, max_tokens=limit).choices[0].message
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "where lima"}]
    if "oslo" in example["prompt"]:
        chat.create(model="checker", messages=[{"role": "user", "content": "where bern"}], max_tokens=3)


def agreeing_reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Outcomes; those of a prompt with an odd number are equal."""
    rewards = parity_reward(completion_ids)
    return [0.5 if int(prompt.split()[0][1:]) % 2 else r for prompt, r in zip(prompts, rewards, strict=True)]


def taught_policy(folder: Path, scripts: Sequence[str] = SCRIPTS, template: str | None = None) -> None:
    """Write a policy that follows `scripts` when it is sampled greedily, with a chat template if that is given."""
    tokenizer, policy = agent_tokenizer(), agent_policy()
    tokenizer.chat_template = template
    teach(policy, tokenizer, scripts)
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_trainer(case: Case) -> SOGRPOTrainer:
    """The trainer of this process. Its share of the batch follows from the number of processes."""
    folder = Path(case.folder)
    if case.rollout == "fixed":
        rows, kind = prompts(16 if case.refill else 8), Routed if "router_replay" in case.options else UnevenRollout
        dataset, rollout = rows.add_column("golden", rows["prompt"]), kind()
    elif case.rollout == "search":
        dataset, rollout = questions(2), SearchRollout(open_search(case), PROTOCOL, LIMITS)
    else:
        dataset, rollout = questions(2), EndpointRollout(calls_of_two_lengths)
    torch.manual_seed(0)  # of the adapter's weights
    reward = agreeing_reward if case.agreeing else turn_reward if case.turn_rewards else parity_reward
    trainer = trainer_of(case)(
        str(folder / "policy"),
        [reward, InformationGain(column="golden", prefix="")] if case.gain else reward,
        build_config(case),
        dataset,
        processing_class=AutoTokenizer.from_pretrained(folder / "policy"),
        peft_config=LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM") if case.lora else None,
        rollout_func=rollout,
        method={"credit": lambda rollout: rollout.returns} if case.no_baseline else case.method,
    )
    if case.stopped:
        always = Rule("always", {"reward": partial(level, threshold=-1.0)}, "none")
        trainer.add_callback(CollapseGuard("stop", [always]))
    return trainer


def trainer_of(case: Case) -> type[SOGRPOTrainer]:
    return GroupRefillTrainer if case.refill else SOGRPOTrainer


def open_search(case: Case) -> Any:
    if case.search_url:
        return SearchArguments(search_url=case.search_url).build_search().backend
    return BM25Index.load(Path(case.folder) / "index")


def build_config(case: Case) -> SOGRPOConfig:
    """Two rollouts, and two optimizer steps on each: the second one's ratios leave the clip range."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    fields: dict[str, Any] = {
        "output_dir": str(Path(case.folder) / "output"),
        "per_device_train_batch_size": BATCH_SIZE[case.rollout] // (case.micro_batches * processes),
        "gradient_accumulation_steps": case.micro_batches,
        "num_generations": NUM_GENERATIONS[case.rollout],
        "num_iterations": 2,
        "max_steps": 4,
        "max_completion_length": 32,
        "beta": 0.05,
        # Linear in the gradient, where Adam would blow up rounding differences.
        "optim": "sgd",
        "learning_rate": 5.0 if case.lora else 1.0,
        "target_kl": 0.0,
        "lr_scheduler_type": "constant",
        "shuffle_dataset": False,
        "top_k": 1,
        "logging_steps": 1,
        "log_turn_details": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "model_init_kwargs": {"dtype": "auto"},
    }
    return trainer_of(case).config_class(**{**fields, **case.options})


@dataclass(frozen=True)
class ResumeCase:
    """A run, and one that goes on from it. It travels to the worker as JSON."""

    folder: str
    kind: str = "exactly"
    """One of `resume_worker.KINDS`."""
    trainer: str = "so_grpo"
    steps: list[int] = field(default_factory=list)
    """Steps whose checkpoints are resumed."""
    target_kl: float = 0.0
