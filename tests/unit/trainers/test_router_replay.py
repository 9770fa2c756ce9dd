"""Routing replay against a model whose routers are made to choose otherwise, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import Tensor

from sorl_trl import SOGRPOConfig, SOGRPOTrainer, SOPPOConfig, SOPPOTrainer
from sorl_trl.rollout.routing import LIVE, ROUTES, Replay, Routers, laid_out_routes, replay_gaps
from sorl_trl.types import Observation, Trajectory, Turn
from tests.agents import VOCABULARY, build_agent
from tests.model_families import GQA, MOE, SHAPE, build
from tests.policies import build_moe_policy
from tests.training import settings
from tests.trajectories import SeveralContexts, parity_reward, prompts
from tests.unit.evaluation.trajectories import TWO_AGENTS

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
SIZE = {**GQA, "vocab_size": 32}
DEEPSEEK = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
GROUPS = {"n_group": 2, "topk_group": 1}
FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen2_moe": lambda: hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**SIZE, **{**MOE, **EXPERTS})),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SIZE, **{**MOE, **EXPERTS}, head_dim=8)),
    "olmoe": lambda: hf.OlmoeForCausalLM(hf.OlmoeConfig(**SIZE, **EXPERTS)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SIZE, num_local_experts=8)),
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**SIZE, head_dim=8, num_local_experts=8, num_experts_per_tok=2)
    ),
    "deepseek_v3": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(**{**SIZE, "num_key_value_heads": 4}, **DEEPSEEK, **LATENT, **GROUPS)
    ),
    "glm4_moe": lambda: hf.Glm4MoeForCausalLM(hf.Glm4MoeConfig(**SIZE, **DEEPSEEK, **GROUPS, head_dim=8)),
}
SO_GRPO, SO_PPO = (SOGRPOTrainer, SOGRPOConfig), (SOPPOTrainer, SOPPOConfig)
IDS = torch.tensor([[5, 9, 4, 30, 11, 7], [8, 8, 21, 3, 19, 2]])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_with_its_own_choice_imposed_computes_the_same(family: str) -> None:
    model = build(FAMILIES[family])
    routers = Routers(model)
    with torch.no_grad():
        plain = model(IDS).logits
        with routers.replayed() as last:
            assert torch.equal(model(IDS).logits, plain)
        with routers.replayed(last().to(torch.int16)) as again:
            assert torch.equal(model(IDS).logits, plain)
        assert torch.equal(again(), last())
        with routers.replayed(torch.full_like(last(), LIVE)):
            assert torch.equal(model(IDS).logits, plain)
        other = torch.full_like(last(), LIVE)
        other[3, 0] = (last()[3, 0] + 1) % 8  # one token, in one layer
        with routers.replayed(other) as again:
            changed = (model(IDS).logits - plain).abs().amax(-1).flatten() > 0
    assert torch.equal(again()[:, 0], last()[:, 0]), "the routers report what they would have taken"
    reads = [3, 4, 5] if routers.shape[0] > 1 else [3]  # in the last layer, no other token reads it
    assert changed.nonzero().squeeze(1).tolist() == reads


def test_gradients_reach_the_router_with_the_choice_held_fixed() -> None:
    model = build(FAMILIES["mixtral"])
    routers = Routers(model)
    fixed = torch.tensor([[0, 5], [3, 1]]).expand(IDS.numel(), 2, 2)

    def loss() -> Tensor:
        with routers.replayed(fixed):
            return model(IDS).logits.log_softmax(-1)[..., 6].sum()

    weight = model.model.layers[0].mlp.gate.weight
    loss().backward()
    assert weight.grad is not None
    assert weight.grad[[1, 2, 3, 4, 6, 7]].abs().max() < 1e-5 < weight.grad[[0, 5]].abs().max()
    step = 1e-3  # the softmax of the router is in float32
    with torch.no_grad():
        weight[5, 2] += step
        above = loss()
        weight[5, 2] -= 2 * step
        slope = (above - loss()) / (2 * step)
    torch.testing.assert_close(weight.grad[5, 2], slope, rtol=1e-2, atol=1e-3)


def test_a_router_that_an_adapter_trains_is_replayed_and_a_critic_s_is_not() -> None:
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["gate"])
    model = get_peft_model(build(FAMILIES["mixtral"]), config).get_base_model()
    model.add_module("critic", build(FAMILIES["mixtral"]))
    routers = Routers(model)
    assert routers.shape == (2, 2)
    with torch.no_grad(), routers.replayed() as last:
        plain = model(IDS).logits
    with torch.no_grad(), routers.replayed(last()):
        assert torch.equal(model(IDS).logits, plain)


def test_other_models_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has no router"):
        Routers(hf.LlamaForCausalLM(hf.LlamaConfig(**GQA)))
    phi = hf.PhimoeForCausalLM(hf.PhimoeConfig(**SHAPE, num_local_experts=4, num_key_value_heads=2))
    with pytest.raises(ValueError, match="PhimoeTopKRouter: they must be Qwen2MoeTopKRouter, "):
        Routers(phi)


def routed(*by_turn: list[int]) -> Trajectory:
    """With one router that chooses one expert, whose number is given for each token that a turn has read."""
    routes = iter([np.array(chosen, dtype=np.uint8).reshape(-1, 1, 1) for chosen in by_turn])
    segments = (replace(s, routes=next(routes)) if isinstance(s, Turn) else s for s in TWO_AGENTS.segments)
    return replace(TWO_AGENTS, segments=tuple(segments))


READ = [2, 3, 5], [4, 7, 8], [4, 10], [9, 14], [6, 15, 16]
"""Each token goes to the expert of its own number."""


def test_a_token_has_the_routes_of_its_first_reader() -> None:
    """What follows the last turn of a context has none."""
    known = routed(*READ)
    found = laid_out_routes(known, (1, 1))
    assert (found.dtype, found.shape) == (np.int16, (16, 1, 1))
    assert found.ravel().tolist() == [2, 3, 5, 6, 4, 7, 8, 9, 4, 10, -1, 14, -1, 15, 16, -1]
    ends_with = replace(known, segments=(*known.segments, Observation((20,), "", context=2)))
    assert laid_out_routes(ends_with, (1, 1)).ravel().tolist() == [*found.ravel(), -1]
    partly = replace(known, segments=[replace(s, routes=None) if s.token_ids == (12,) else s for s in known.segments])
    assert laid_out_routes(partly, (1, 1)).ravel().tolist()[7:12] == [-1, 4, 10, -1, -1]


def test_routes_that_are_no_engine_s_are_refused() -> None:
    with pytest.raises(RuntimeError, match="routes of 3 new tokens, not 2"):
        laid_out_routes(routed(*READ[:3], [*READ[3], 12], READ[4]), (1, 1))


# A trainer -----------------------------------------------------------------------------------------------------------


class Noisy(SeveralContexts):
    """Returns the routes and log-probabilities of an engine with the policy's weights that chooses at random."""

    def __call__(self, asked: list[Any], trainer: Any) -> dict[str, Any]:
        output = super().__call__(asked, trainer)
        model = trainer.accelerator.unwrap_model(trainer.model)
        routers, generator = Routers(model), torch.Generator().manual_seed(self.calls)
        output |= {"routes": [], "logprobs": []}
        for prompt, ids, contexts in zip(
            *(output[n] for n in ("prompt_ids", "completion_ids", "context_ids")), strict=True
        ):
            draws = torch.rand(len(prompt) + len(ids), *routers.shape[:1], 8, generator=generator)
            routes, logps = draws.topk(2).indices, torch.zeros(len(ids), dtype=torch.float64)
            for context in {abs(each) for each in contexts}:
                places = [number for number, each in enumerate(contexts) if abs(each) == context]
                within = [*([] if context else range(len(prompt))), *(len(prompt) + place for place in places)]
                text = torch.tensor([[*prompt, *ids]])[:, within]
                with torch.no_grad(), routers.replayed(routes[within]):
                    found = model(text).logits.log_softmax(-1)[0, :-1].gather(1, text[0, 1:, None])[:, 0]
                known = torch.cat([found.new_zeros(1), found])
                logps[places] = known[-len(places) :]
            output["routes"].append(routes.to(torch.int16).numpy())
            output["logprobs"].append(logps.tolist())
        return output


def trainer_of(folder: Path, tokenizer: Any, kind: Any = SO_GRPO, **overrides: Any) -> Any:
    model = overrides.pop("model", None) or build(FAMILIES["qwen3_moe"])
    rollout = overrides.pop("rollout_func", None) or Noisy()
    args = kind[1](**settings(folder, gradient_checkpointing=False, **overrides))
    trainer = kind[0](model, parity_reward, args, prompts(), processing_class=tokenizer, rollout_func=rollout)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def rollout_of(trainer: Any) -> dict[str, Any]:
    rows = [dict(row) for row in prompts(4) for _ in range(4)]
    batch: dict[str, Any] = trainer._generate_and_score_completions(rows)
    return batch


def live(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in batch.items() if name != ROUTES}


def gap(trainer: Any, batch: dict[str, Any], replay: bool) -> float:
    kept = batch["turn_ids"] >= 0
    logps = trainer._score(trainer.model, batch if replay else live(batch)).logps
    return float((logps - batch["sampling_per_token_logps"]).abs()[kept].max())


def test_r3_gives_what_the_engine_computed(tmp_path: Path, tokenizer: Any) -> None:
    """Rows of different lengths and several contexts, padded or packed, with the boundary token of each turn."""
    trainer = trainer_of(tmp_path, tokenizer, router_replay="r3", log_turn_details=True)
    batch = rollout_of(trainer)
    assert len(trainer._forward.layouts) == 2
    assert gap(trainer, batch, True) < 1e-6  # the routers' softmax is in float32
    assert gap(trainer, batch, False) > 0.1
    for layout in trainer._forward.layouts:
        one_by_one = trainer._forward(trainer.model, batch, rows=1, layouts=[layout]).logps
        torch.testing.assert_close(one_by_one, batch["old_per_token_logps"], rtol=0, atol=1e-9)
    logged = trainer._metrics["train"]
    assert logged["router_replay/logp_gap"][0] < 1e-6 < 0.01 < logged["router_replay/logp_gap_without"][0]
    trainer._compute_loss(trainer.model, batch)
    assert 0.5 < trainer._metrics["train"]["router_replay/rerouted"][0] <= 1


def test_a_token_is_rerouted_if_some_layer_chose_another_expert() -> None:
    """In whatever order; a token that was not replayed does not count. Three tokens, two layers, two experts each."""
    routes = torch.tensor([[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[LIVE, LIVE], [LIVE, LIVE]]])
    chosen = torch.tensor([[[1, 0], [3, 2]], [[1, 0], [3, 1]], [[0, 1], [2, 3]]])
    routers: Any = None
    others, replayed = Replay(routers, [routes[:1], routes[1:]], [chosen]).metrics()["router_replay/rerouted"]
    assert others[replayed].tolist() == [0.0, 1.0] and replayed.tolist() == [True, True, False]


def test_a_token_that_the_engine_could_not_score_is_no_gap() -> None:
    batch = {
        "sampling_per_token_logps": torch.tensor([[-1.0, math.nan, -3.0]]),
        "turn_ids": torch.tensor([[0, 0, -1]]),
    }
    found = replay_gaps(batch, torch.tensor([[-1.5, -1.0, -1.0]]), lambda: torch.tensor([[-3.0, -1.0, -1.0]]))
    assert [(name, values[kept].tolist()) for name, values, kept in found] == [
        ("router_replay/logp_gap", [0.5]),
        ("router_replay/logp_gap_without", [2.0]),
    ]


@contextmanager
def choosing_otherwise(model: Any) -> Iterator[None]:
    """Within it, the first router's live choice is another one."""
    gate = model.model.layers[0].mlp.gate
    with torch.no_grad():
        gate.weight.neg_()
    yield
    with torch.no_grad():
        gate.weight.neg_()


def test_r3_replays_the_engine_in_updates_and_nowhere_else(tmp_path: Path, tokenizer: Any) -> None:
    trainer = trainer_of(tmp_path, tokenizer, router_replay="r3")
    batch = rollout_of(trainer)
    lengths = batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)
    assert [len(row) for row in batch[ROUTES]] == lengths.tolist()
    with choosing_otherwise(trainer.model):
        seen: dict[str, Tensor] = {}
        gate = trainer.model.model.layers[0].mlp.experts
        handle = gate.register_forward_pre_hook(lambda _, args: seen.update(experts=args[1]))
        trainer._score(trainer.model, live(batch))
        own = seen["experts"]
        trainer._compute_loss(trainer.model, batch)
        assert not torch.equal(seen["experts"], own)
        trainer.model.eval()
        assert ROUTES not in rollout_of(trainer), "an evaluation is not replayed"
        handle.remove()


def test_the_reference_model_is_never_replayed(tmp_path: Path, tokenizer: Any) -> None:
    model = build(FAMILIES["qwen3_moe"])
    model.save_pretrained(tmp_path / "policy")
    fields = {"model": str(tmp_path / "policy"), "beta": 0.1, "model_init_kwargs": {"dtype": "auto"}}
    trainer = trainer_of(tmp_path, tokenizer, router_replay="r3", **fields)
    for each in (trainer.model, trainer.ref_model):
        each.set_experts_implementation("eager")
    batch = rollout_of(trainer)
    own = trainer._score(trainer.model, live(batch)).logps
    torch.testing.assert_close(batch["ref_per_token_logps"], own, rtol=0, atol=1e-9)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_backward_recomputes_is_replayed(tmp_path: Path, tokenizer: Any, reentrant: bool) -> None:
    """Backward runs when the pass, and what it imposed, has ended."""
    gradients = []
    for checkpoints in (False, True):
        # With reentrant checkpointing, the loss of transformers' routers has no gradient.
        fields = {"router_replay": "r3", "router_aux_loss_coef": 0.0 if reentrant else 0.1}
        trainer = trainer_of(tmp_path / str(checkpoints), tokenizer, **fields)
        batch = rollout_of(trainer)
        if checkpoints:
            trainer.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            trainer.model.enable_input_require_grads()
        loss = trainer._compute_loss(trainer.model, batch)
        loss.backward()
        gradients.append({name: each.grad for name, each in trainer.model.named_parameters() if each.grad is not None})
    plain, recomputed = gradients
    assert plain.keys() <= recomputed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_what_cannot_be_replayed_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="must be one of 'none', 'r3'"):
        trainer_of(tmp_path, tokenizer, router_replay="r2")
    model = get_peft_model(build(FAMILIES["qwen3_moe"]), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="adapter"):
        trainer_of(tmp_path, tokenizer, SO_PPO, model=model, router_replay="r3", critic="adapter")


def test_r3_without_routes_is_one_plain_error(tmp_path: Path, tokenizer: Any) -> None:
    trainer = trainer_of(tmp_path, tokenizer, router_replay="r3", rollout_func=SeveralContexts())
    with pytest.raises(ValueError, match="did not return `routes`"):
        rollout_of(trainer)


def test_a_completion_that_is_masked_because_it_was_cut_is_no_mistake(tmp_path: Path, tokenizer: Any) -> None:
    trainer = trainer_of(tmp_path, tokenizer, router_replay="r3", mask_truncated_completions=True)
    batch = rollout_of(trainer)
    assert not batch["completion_mask"].any(1).all(), "some rows are masked"
    assert gap(trainer, batch, True) < 1e-6


def test_so_ppo_trains_with_r3(tmp_path: Path, tokenizer: Any) -> None:
    trainer = trainer_of(tmp_path, tokenizer, SO_PPO, router_replay="r3", max_steps=2, num_generations=4)
    trainer.train()
    shares = [row["router_replay/rerouted"] for row in trainer.state.log_history if "router_replay/rerouted" in row]
    assert len(shares) == 2 and min(shares) > 0


def test_asynchronous_rollouts_report_routes(tmp_path: Path) -> None:
    fields = {"router_replay": "r3", "async_staleness": 1, "max_steps": 2}
    trainer = build_agent(tmp_path, model=build_moe_policy(vocab_size=len(VOCABULARY)), **fields)
    trainer.train()  # which refuses a rollout without routes
    assert sum("router_replay/rerouted" in row for row in trainer.state.log_history) == 2
