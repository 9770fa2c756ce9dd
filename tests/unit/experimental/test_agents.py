"""Agents with weights of their own: whose gradient it is, and what one adapter for all would have done."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, PeftModel
from torch import Tensor
from transformers import TrainerCallback

from sorl_trl import SOGRPOConfig, SOGRPOTrainer
from sorl_trl.experimental import MultiAgentTrainer
from sorl_trl.experimental.agents import share_of
from sorl_trl.trainers.agents import names_of
from sorl_trl.trainers.forward import Forward
from tests.agents import steps_after
from tests.critics import ADAPTERS, lora_config
from tests.policies import build_moe_policy, build_policy
from tests.training import IN_FLOAT64, saved_policy, settings
from tests.trajectories import FixedRollout, SeveralContexts, parity_reward, prompts

pytestmark = pytest.mark.trains

TEAM = ("planner", "searcher")
PLAIN: dict[str, Any] = {"gradient_checkpointing": False, "target_kl": 0.0}
TO_TRAINER = ("method", "eval_dataset", "learning_rates", "peft_config")
ONE_UPDATE = {"steps_per_generation": 2, "num_iterations": 1, "max_steps": 1}


def named(rollout: type[FixedRollout], *names: str) -> Any:
    """A rollout whose turns, unless it names their agents, are those of these agents, in turn."""

    class Named(rollout):  # type: ignore[misc, valid-type]
        def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
            output = super().__call__(prompts, trainer)
            counts = [max(row, default=-1) + 1 for row in output["turn_ids"]]
            return {"agents": [[names[k % len(names)] for k in range(count)] for count in counts], **output}

    return Named()


def build(folder: Path, tokenizer: Any, *names: str, agents: Any = TEAM, **overrides: Any) -> Any:
    """In float64; the turns are those of the agents of these `names`, in turn. If `agents` is None, they share one."""
    if isinstance(agents, tuple):
        agents = dict.fromkeys(agents, lora_config())
    rollout = overrides.pop("rollout_func", FixedRollout)
    more = {name: overrides.pop(name) for name in TO_TRAINER if name in overrides}
    trainer_class, own = (MultiAgentTrainer, {"agents": agents})
    if agents is None:
        trainer_class, own = SOGRPOTrainer, {"peft_config": lora_config()}
    model = overrides.pop("model", None) or saved_policy(folder, torch.float64)
    return trainer_class(
        model, parity_reward, SOGRPOConfig(**settings(folder, **{**PLAIN, **IN_FLOAT64, **overrides})), prompts(),
        processing_class=tokenizer, rollout_func=named(rollout, *(names or TEAM)),
        **{"method": {"terms": "clip_penalty"}, **more, **own},
    )  # fmt: skip


def adapter(trainer: Any, name: str) -> dict[str, Tensor]:
    """The parameters of an adapter, by their names in any."""
    found = {n: p for n, p in trainer.model.named_parameters() if name in n.split(".")}
    return {n.replace(f".{name}", ""): p for n, p in found.items()}


def copy_adapter(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    assert source.keys() == target.keys() and source
    with torch.no_grad():
        for name, parameter in source.items():
            target[name].copy_(parameter)


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    assert ours.keys() == theirs.keys() and ours
    for name, each in ours.items():
        torch.testing.assert_close(each, theirs[name], rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


def gradients(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


def scored(trainer: Any) -> dict[str, Any]:
    """A batch of one rollout."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer._generate_and_score_completions([dict(prompts()[i // 4]) for i in range(8)])


@pytest.mark.parametrize("config", ADAPTERS)
def test_a_turns_gradient_is_that_of_its_agents_adapter_alone(tmp_path: Path, tokenizer: Any, config: str) -> None:
    """Also after the pass of the reference, in which PEFT has frozen all but one."""
    agents = dict.fromkeys(TEAM, lora_config(**ADAPTERS[config]))
    trainer = build(tmp_path, tokenizer, agents=agents, beta=0.1)
    batch = scored(trainer)
    for number, (name, other) in enumerate((TEAM, TEAM[::-1])):
        trainer.model.zero_grad()
        logps = trainer._forward(trainer.model, batch).logps
        logps[batch["agent_ids"] == number].sum().backward()
        own, others = gradients(adapter(trainer, name)), gradients(adapter(trainer, other))
        assert len(own) == len(others) == len(adapter(trainer, name))
        assert any(each.any() for each in own.values())
        assert not any(each.any() for each in others.values())
        base = [n for n, p in trainer.model.named_parameters() if p.grad is not None and not {*TEAM} & {*n.split(".")}]
        assert not base


@pytest.mark.parametrize("rollout", [FixedRollout, SeveralContexts])
def test_equal_adapters_do_together_what_one_does(tmp_path: Path, tokenizer: Any, rollout: Any) -> None:
    """The gradients of the agents add up to that of an adapter that both share, as do losses and metrics."""
    options = {"rollout_func": rollout, "beta": 0.1, "log_turn_details": True}
    shared, apart = (build(tmp_path, tokenizer, agents=agents, **options) for agents in (None, TEAM))
    for name in TEAM:
        copy_adapter(adapter(shared, "default"), adapter(apart, name))
    losses = []
    for trainer in (shared, apart):
        batch = scored(trainer)
        losses.append(trainer._compute_loss(trainer.model, batch))
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=0, atol=1e-9)
    parts = [gradients(adapter(apart, name)) for name in TEAM]
    assert all(any(each.abs().max() > 1e-4 for each in part.values()) for part in parts)
    assert_close({n: parts[0][n] + parts[1][n] for n in parts[0]}, gradients(adapter(shared, "default")))
    for name, values in shared._metrics["train"].items():
        assert apart._metrics["train"][name] == pytest.approx(values, nan_ok=True), name


def test_if_one_agent_has_all_turns_it_trains_as_one_adapter_does(tmp_path: Path, tokenizer: Any) -> None:
    """And the other stays as it is. Five updates, several on one rollout."""
    alone, team = (build(tmp_path, tokenizer, "searcher", agents=agents) for agents in (None, TEAM))
    copy_adapter(adapter(alone, "default"), adapter(team, "searcher"))
    idle = {name: p.clone() for name, p in adapter(team, "planner").items()}
    before = {name: p.clone() for name, p in adapter(team, "searcher").items()}
    for trainer in (alone, team):
        torch.manual_seed(0)  # of the order of rows
        trainer.train()
    assert_close(adapter(team, "searcher"), adapter(alone, "default"))
    assert max((p - before[name]).abs().max() for name, p in adapter(team, "searcher").items()) > 1e-3
    assert_close(adapter(team, "planner"), idle, 0.0)
    for ours, theirs in zip(team.state.log_history[:-1], alone.state.log_history[:-1], strict=True):
        assert ours["agents/planner/grad_norm"] == 0.0
        assert ours["agents/searcher/grad_norm"] == pytest.approx(theirs["grad_norm"], abs=1e-6)
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], abs=1e-6)


class OnceByPlanner(FixedRollout):
    """The first turn of each rollout is the planner's, and all others are the searcher's."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        agents = [["searcher"] * (max(row) + 1) for row in output["turn_ids"]]
        agents[0][0] = "planner"
        return {**output, "agents": agents}


@pytest.mark.parametrize("router_loss", [False, True])
def test_who_has_no_token_in_an_update_stays_where_it_is(tmp_path: Path, tokenizer: Any, router_loss: bool) -> None:
    """Neither momentum nor decay move it. Of four updates on a rollout, two have a token of the planner."""
    model = build_moe_policy().double() if router_loss else None
    more = {"model": model, "router_aux_loss_coef": 0.1} if router_loss else {}
    trainer = build(
        tmp_path, tokenizer, rollout_func=OnceByPlanner, max_steps=12, weight_decay=0.1,
        lr_scheduler_type="constant", **more,
    )  # fmt: skip
    weights: list[dict[str, Tensor]] = []

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            weights.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})

        on_train_end = on_step_begin

    trainer.add_callback(Watch())
    trainer.train()
    moved = {
        agent: [any((b[n] != a[n]).any() for n in a if agent in n.split(".")) for a, b in pairwise(weights)]
        for agent in TEAM
    }
    assert moved["searcher"] == [True] * 12
    has_token = [log["agents/planner/kl_to_old"] is not None for log in trainer.state.log_history[:-1]]
    assert moved["planner"] == has_token and sum(has_token) == 6


def test_which_agent_is_which_does_not_matter(tmp_path: Path, tokenizer: Any) -> None:
    """Names, labels, shapes and rates are exchanged, and so are the adapters that come out."""
    small, large = lora_config(), lora_config(r=4, target_modules=["q_proj", "down_proj"])
    rates = {"planner": 1e-3, "searcher": 3e-2}
    one = build(tmp_path, tokenizer, agents={"planner": small, "searcher": large}, learning_rates=rates)
    rates = {"searcher": 1e-3, "planner": 3e-2}
    other = build(tmp_path, tokenizer, *TEAM[::-1], agents={"planner": large, "searcher": small}, learning_rates=rates)
    for ours, theirs in (TEAM, TEAM[::-1]):
        copy_adapter(adapter(one, ours), adapter(other, theirs))
    before = {name: {n: p.clone() for n, p in adapter(one, name).items()} for name in TEAM}
    for trainer in (one, other):
        torch.manual_seed(0)  # of the order of rows
        trainer.train()
    for ours, theirs in (TEAM, TEAM[::-1]):
        assert_close(adapter(one, ours), adapter(other, theirs))
        assert any((p - before[ours][n]).abs().max() > 1e-4 for n, p in adapter(one, ours).items())
    for log, swapped in zip(one.state.log_history[:-1], other.state.log_history[:-1], strict=True):
        assert log["agents/planner/grad_norm"] == pytest.approx(swapped["agents/searcher/grad_norm"], abs=1e-6)
        norms = [log[f"agents/{name}/grad_norm"] for name in TEAM]
        assert log["grad_norm"] == pytest.approx(math.hypot(*norms), rel=1e-5)


def test_each_agent_has_its_own_rate_and_clip(tmp_path: Path, tokenizer: Any) -> None:
    """Plain SGD moves an adapter by its rate times its gradient, which is clipped to a norm of 1e-3 for each."""
    rates = {"planner": 0.5, "searcher": 0.0}
    options = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 1e-3, **ONE_UPDATE}
    trainer = build(tmp_path, tokenizer, agents=(*TEAM, "writer"), learning_rates=rates, **options)
    assert trainer.args.learning_rate == 2e-2
    before = {name: {n: p.clone() for n, p in adapter(trainer, name).items()} for name in trainer.agents}
    trainer.train()
    moved = [
        math.sqrt(sum((p - before[name][n]).square().sum().item() for n, p in adapter(trainer, name).items()))
        for name in trainer.agents
    ]
    assert moved == pytest.approx([0.5e-3, 0.0, 0.0], rel=1e-4)
    assert trainer.state.log_history[0]["agents/planner/grad_norm"] > 1e-3
    grouped = [id(p) for group in trainer.optimizer.param_groups for p in group["params"]]
    assert len(grouped) == len({*grouped}) == sum(p.requires_grad for p in trainer.model.parameters())


@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_gradient_checkpointing_changes_no_gradient(tmp_path: Path, tokenizer: Any, reentrant: bool) -> None:
    """Layers are computed again during backward, when no agent's adapter is active but PEFT's choice."""
    found = []
    for checkpointing in (False, True):
        options = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
        trainer = build(tmp_path, tokenizer, gradient_checkpointing=checkpointing, **options)
        if checkpointing:  # as `train` does
            trainer.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        trainer._compute_loss(trainer.model, scored(trainer)).backward()
        assert trainer.model.get_base_model().is_gradient_checkpointing == checkpointing
        found.append({name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None})
    assert {name for name, gradient in found[0].items() if gradient.any()} == {
        n for n, p in trainer.model.named_parameters() if p.requires_grad
    }
    assert_close(*found, 1e-12)


def test_what_an_agent_does_not_depend_on_is_not_read(tmp_path: Path, tokenizer: Any) -> None:
    """Leaving it out changes nothing, nor does dropout, which is off."""
    agents = dict.fromkeys(TEAM, lora_config(lora_dropout=0.5))
    trainer = build(tmp_path, tokenizer, agents=agents, rollout_func=SeveralContexts)
    batch = scored(trainer)
    assert names_of(batch) == TEAM
    counts = []
    for number, name in enumerate(TEAM):
        share, own = share_of(batch, name), batch["agent_ids"] == number
        with trainer.acting(name):
            read, whole = (Forward.__call__(trainer._forward, trainer.model, each).logps for each in (share, batch))
        torch.testing.assert_close(read, torch.where(own, whole, 0.0), rtol=0, atol=1e-12)
        assert (read[own] < 0).all()
        masks = [torch.cat([each["prompt_mask"], each["completion_mask"]], 1).sum(1) for each in (share, batch)]
        assert share["completion_mask"][~own.any(1)].eq(0).all()
        counts.append(int(masks[0].sum()) / int(masks[1].sum()))
    assert all(0.1 < count < 0.9 for count in counts), counts


def test_the_router_loss_is_the_mean_of_the_agents_passes(tmp_path: Path, tokenizer: Any) -> None:
    policy = build_moe_policy().double()
    policy.config.num_experts_per_tok = policy.num_experts_per_tok = (
        1  # with both of two experts, the loss is a constant
    )
    trainer = build(tmp_path, tokenizer, model=policy, router_aux_loss_coef=0.1)
    batch = scored(trainer)
    losses = []
    for name in TEAM:
        with trainer.acting(name):
            share = share_of(batch, name)
            losses.append(Forward.__call__(trainer._forward, trainer.model, share, router=True).aux_loss.item())
    found = trainer._forward(trainer.model, batch, router=True).aux_loss.item()
    assert found == pytest.approx(sum(losses) / 2) and abs(found - losses[0]) > 1e-4


class TestCheckpoints:
    def test_a_resumed_run_goes_on_exactly(self, tmp_path: Path, tokenizer: Any) -> None:
        """Within a rollout and between two, also if agents are named in another order.

        The checkpoint's rates go on, since they are the optimizer's.
        """
        options: dict[str, Any] = {"save_strategy": "steps", "beta": 0.1, "method": {"credit": "agent_wise"}}
        rates = {"learning_rates": {"searcher": 1e-3}}
        whole = build(tmp_path / "whole", tokenizer, **options, **rates, save_steps=1)
        whole.train()
        for step in (3, 4):
            resumed = build(tmp_path / f"from-{step}", tokenizer, agents=TEAM[::-1], **options, save_steps=100)
            resumed.rollout_func.calls = 1
            resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
            assert resumed.optimizer.state_dict()["param_groups"] == whole.optimizer.state_dict()["param_groups"]
            ours, theirs = (steps_after(step, trainer.state.log_history) for trainer in (resumed, whole))
            assert ours == theirs and len(ours) == 5 - step
            for name, weight in resumed.model.state_dict().items():
                assert torch.equal(weight, whole.model.state_dict()[name]), f"{name}, resumed after step {step}"

    def test_what_is_saved_is_a_plain_adapter_each(self, tmp_path: Path, tokenizer: Any) -> None:
        trainer = build(tmp_path, tokenizer, **ONE_UPDATE)
        trainer.train()
        trainer.save_model(str(tmp_path / "out"))
        assert {path.parent.name for path in (tmp_path / "out").rglob("adapter_config.json")} == {*TEAM}
        ids = torch.tensor([[5, 6, 7, 20, 8]])
        trainer.model.eval()
        for name in TEAM:
            base = build_policy().double()
            loaded = PeftModel.from_pretrained(base, str(tmp_path / "out" / name), adapter_name=name)
            with trainer.acting(name), torch.no_grad():
                logits = trainer.model(input_ids=ids).logits
            torch.testing.assert_close(loaded(input_ids=ids).logits, logits, rtol=0, atol=1e-12)
            assert (logits - build_policy().double()(input_ids=ids).logits).abs().max() > 1e-3

    def test_the_best_checkpoint_is_loaded_with_all_adapters(self, tmp_path: Path, tokenizer: Any) -> None:
        trainer = build(tmp_path, tokenizer, **ONE_UPDATE, save_strategy="steps", save_steps=1)
        trainer.train()
        saved = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        for name in TEAM:
            for parameter in adapter(trainer, name).values():
                parameter.data.zero_()
        trainer.state.best_model_checkpoint = str(tmp_path / "checkpoint-1")
        trainer._load_best_model()
        assert_close(dict(trainer.model.named_parameters()), saved, 0.0)

    def test_another_agents_checkpoint_is_refused(self, tmp_path: Path, tokenizer: Any) -> None:
        build(tmp_path, tokenizer, **ONE_UPDATE, save_strategy="steps", save_steps=1).train()
        other = build(tmp_path / "other", tokenizer, agents=("planner", "writer"), **ONE_UPDATE)
        with pytest.raises(FileNotFoundError, match="writer/adapter_model"):
            other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"use_vllm": True}, "`use_vllm` is True"),
        ({"async_staleness": 1}, "`async_staleness` is 1"),
        ({"ddp_find_unused_parameters": True}, "`ddp_find_unused_parameters` is True"),
        (
            {"learning_rates": {"writer": 1e-3}},
            "`learning_rates` is 'writer', but must be one of",
        ),
        ({"learning_rates": {"planner": -1.0}}, r"learning_rates\['planner'\]"),
        ({"agents": ("planner", "weight")}, "'weight'"),
        ({"agents": ("planner", "q_proj")}, "'q_proj'"),
        ({"agents": ("planner", "default")}, "'default'"),
        ({"agents": ("planner", "critic")}, "'critic'"),
        ({"agents": ("planner", "gpt-4.1")}, "'gpt-4.1'"),
        ({"agents": {}}, "`agents` is {}"),
        ({"learning_rates": 1e-3}, "`learning_rates` is 0.001"),
        ({"peft_config": lora_config()}, "`peft_config` is LoraConfig"),
        ({"agents": {"planner": AdaLoraConfig(total_step=10)}}, r"agents\['planner'\].*AdaLora"),
        ({"agents": {"planner": lora_config(bias="all")}}, r"agents\['planner'\].*bias='all'"),
    ],
)
def test_what_cannot_be_honoured_is_refused(tmp_path: Path, tokenizer: Any, options: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        build(tmp_path, tokenizer, **options)


def test_a_turn_of_an_agent_without_an_adapter_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="of the agent 'writer', but"):
        scored(build(tmp_path, tokenizer, "planner", "writer"))
    with pytest.raises(ValueError, match="of the agent '', but"):
        scored(build(tmp_path, tokenizer, ""))
