"""SO-PPO with every kind of critic: who learns from what, what is saved, refused, and sent to engines."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaModel, TrainerCallback
from transformers.trainer_pt_utils import get_parameter_names
from trl.generation.vllm_generation import VLLMGeneration

from sorl_trl import SOPPOConfig, SOPPOTrainer, load_critic
from sorl_trl.trainers.critic_checkpoint import setup_critic
from tests.agents import agent_policy, build_agent, questions
from tests.critics import (
    CASES,
    SMALL_ROLLOUTS,
    build_ppo,
    critic_parameters,
    logs,
    lora_config,
    moved,
    policy_parameters,
    rollout_batch,
    set_head,
    trainable,
    trained,
    trained_briefly,
    weights,
)
from tests.policies import build_policy
from tests.training import saved_policy, settings
from tests.trajectories import FixedRollout, prompts

EVERY_STEP = {"save_strategy": "steps", "save_steps": 1}


@pytest.mark.parametrize("case", ["head", "adapter", "model_lora"])
class TestRun:
    def test_it_trains_both_and_goes_on_from_plain_checkpoints(
        self, tmp_path: Path, tokenizer: Any, case: str
    ) -> None:
        """Between two updates on one rollout: the critic's values must not be computed again."""
        schedule = {"lr_scheduler_type": "linear", "critic_warmup_steps": 1, "num_iterations": 3, "max_steps": 4}
        fields = {**SMALL_ROLLOUTS, **CASES[case], **schedule, **EVERY_STEP}
        whole = build_ppo(tmp_path / "whole", tokenizer, **fields, model=saved_policy(tmp_path))
        before = weights(dict(whole.model.named_parameters()))
        whole.train()
        parameters, critic = dict(whole.model.named_parameters()), critic_parameters(whole.model)
        assert trainable(critic) == critic.keys()
        # Embeddings of words that never occur stay where they are, but a table as a whole moves.
        assert moved(before, parameters) == trainable(parameters)

        folder, policy = tmp_path / "whole" / "checkpoint-4", policy_parameters(whole.model)
        (file,) = folder.glob("*model.safetensors")
        assert not any("critic" in name for name in load_file(file))
        if CASES[case].get("lora"):
            base = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
            model: Any = PeftModel.from_pretrained(base, folder)
        else:
            model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
            assert not any(info.values())
        assert dict(model.named_parameters()).keys() == policy.keys()
        assert not moved(weights(dict(model.named_parameters())), policy)

        rollout = FixedRollout()
        rollout.calls = 1
        rest = build_ppo(tmp_path / "rest", tokenizer, **fields, rollout_func=rollout, model=saved_policy(tmp_path))
        rest.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
        assert not moved(weights(parameters), dict(rest.model.named_parameters()))
        assert logs(rest)[:4] == logs(whole)[:4]
        assert rest.state.global_step == 4

    def test_the_value_loss_trains_the_critic_alone(self, tmp_path: Path, tokenizer: Any, case: str) -> None:
        """The policy's gradient is bitwise the one it has without a value loss."""
        gradients = []
        for vf_coef in (0.0, 1.0):
            trainer = build_ppo(tmp_path, tokenizer, vf_coef=vf_coef, **CASES[case])
            set_head(trainer)
            loss = trainer._compute_loss(trainer.model, rollout_batch(trainer))
            trainer.model.zero_grad()
            loss.backward()
            gradients.append({name: p.grad for name, p in policy_parameters(trainer.model).items() if p.requires_grad})
            critic = [p.grad for p in critic_parameters(trainer.model).values()]
            assert any(g is not None and g.any() for g in critic) == (vf_coef > 0)
        without, with_loss = gradients
        assert any(g.any() for g in without.values())
        assert all(torch.equal(without[name], with_loss[name]) for name in without)

    def test_every_trained_parameter_is_in_one_group(self, tmp_path: Path, tokenizer: Any, case: str) -> None:
        """And decays, or does not, as in transformers; the head does not."""
        trainer = build_ppo(tmp_path, tokenizer, weight_decay=0.1, learning_rate=2e-2, **CASES[case])
        rate = 2e-2 if case == "model_lora" else 2e-1
        optimizer = trainer.create_optimizer()
        assert trainer.create_optimizer() is optimizer
        names = {id(p): name for name, p in trainer.model.named_parameters()}
        groups = {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(groups)
        assert groups.keys() == trainable(dict(trainer.model.named_parameters()))
        decays = set(trainer.get_decay_parameter_names(trainer.model))
        assert decays < set(get_parameter_names(trainer.model, []))
        for name, group in groups.items():
            assert group.get("critic", False) == (name in critic_parameters(trainer.model)), name
            is_head = ".critic.head." in f".{name}"
            assert group["lr"] == (0.1 if is_head else rate if group.get("critic") else 2e-2), name
            assert group["weight_decay"] == (0.1 if name in decays and not is_head else 0.0), name

    def test_turn_values_are_the_trainers(self, tmp_path: Path, case: str) -> None:
        """V(s_k) of collected trajectories, from the saved critic alone and from the rollout."""
        options = {name: value for name, value in CASES[case].items() if name != "lora"}
        agent_policy().save_pretrained(tmp_path / "base")
        trainer = build_agent(
            tmp_path, trainer_class=SOPPOTrainer, num_generations=1, per_device_train_batch_size=2,
            peft_config=lora_config() if CASES[case].get("lora") else None, model=str(tmp_path / "base"), **options,
        )  # fmt: skip
        set_head(trainer)
        trainer.save_model(tmp_path / "saved")
        trajectories: list[Any] = []
        trainer.reward_funcs = [lambda trajectory, **_: trajectories.extend(trajectory) or [0.0] * len(trajectory)]
        batch = trainer._generate_and_score_completions([dict(row) for row in questions(8)])
        values = load_critic(tmp_path / "saved").turn_values(trajectories)
        assert len({len(row) for row in values}) > 1
        for row, turn_ids, old_values in zip(values, batch["turn_ids"].tolist(), batch["old_values"], strict=True):
            starts = [turn_ids.index(k) for k in range(max(turn_ids) + 1)]
            assert row == pytest.approx(old_values[starts].tolist(), abs=1e-5)
        assert torch.tensor([v for row in values for v in row]).std() > 1e-3


# ---------------------------------------------------------------------------------------------------------------------
# Who learns, at which rate
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["head", "adapter"])
def test_in_the_warm_up_the_policy_stands_still(tmp_path: Path, tokenizer: Any, case: str) -> None:
    """AdamW's weight decay included. An evaluation tells how good the critic is."""
    fields = {"critic_warmup_steps": 2, "weight_decay": 0.1, "max_steps": 2, "num_generations_eval": 1}
    trainer, before = trained(tmp_path, tokenizer, **CASES[case], **fields, eval_dataset=prompts(4))
    assert moved(before, dict(trainer.model.named_parameters())) == critic_parameters(trainer.model).keys()
    metrics = trainer.evaluate()
    assert math.isfinite(metrics["eval_loss"])
    assert {"eval_critic/explained_variance", "eval_critic/value_loss"} <= metrics.keys()


def test_after_the_warm_up_the_schedule_is_where_it_would_have_been(tmp_path: Path, tokenizer: Any) -> None:
    """The critic's has run from the beginning."""
    schedule = {"lr_scheduler_type": "linear", "critic_warmup_steps": 2, "value_head_learning_rate": 0.4}
    trainer = build_ppo(tmp_path, tokenizer, **schedule, learning_rate=0.08, optim="sgd", target_kl=0.0, max_steps=4)
    rates: list[tuple[float, ...]] = []

    class Rates(TrainerCallback):
        def on_step_begin(self, *_: Any, **given: Any) -> None:
            groups = given["optimizer"].param_groups
            of_each = ({g["lr"] for g in groups if g.get("critic", False) == critics} for critics in (False, True))
            rates.append(tuple(rate for each in of_each for rate in each))

    trainer.add_callback(Rates())
    trainer.train()
    assert rates == [pytest.approx(each) for each in [(0.0, 0.4), (0.0, 0.3), (0.04, 0.2), (0.02, 0.1)]]


def ready_adapter(folder: Path) -> PeftModel:
    """A policy whose adapter has been trained before, under the name "default"."""
    torch.manual_seed(4)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(saved_policy(folder)), lora_config())


def test_the_critic_is_the_same_whatever_was_sampled_before(tmp_path: Path) -> None:
    """Every rank has its own random state by then, and the policy's sampling must not notice the critic."""
    config = SOPPOConfig(**settings(tmp_path, num_generations=1))
    made = []
    for seed in (1, 2):
        model = ready_adapter(tmp_path)
        torch.manual_seed(seed)
        expected = torch.get_rng_state()
        setup_critic(model, config, vocabulary=32)
        assert torch.equal(torch.get_rng_state(), expected)
        made.append(weights(critic_parameters(model)))
    assert not moved(made[0], made[1])


def test_the_users_own_optimizer(tmp_path: Path, tokenizer: Any) -> None:
    """It was made before there was a critic: the critic joins it."""
    model = ready_adapter(tmp_path)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.5)
    trainer = build_ppo(
        tmp_path, tokenizer, model=model, optimizers=(optimizer, None), max_steps=2, critic_warmup_steps=1,
        value_head_learning_rate=0.05, critic_learning_rate=0.03,
    )  # fmt: skip
    before = weights(dict(trainer.model.named_parameters()))
    trainer.train()
    own = critic_parameters(trainer.model)
    assert moved(before, own) == own.keys()
    groups = [group for group in optimizer.param_groups if group.get("critic")]
    assert {group["momentum"] for group in groups} == {0.5}
    rates = {id(p): group["initial_lr"] for group in groups for p in group["params"]}
    assert rates == {id(p): 0.05 if "critic.head." in name else 0.03 for name, p in own.items()}
    assert moved(before, policy_parameters(trainer.model))


# ---------------------------------------------------------------------------------------------------------------------
# Where a critic comes from, and what is refused
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["head", "adapter"])
def test_a_critic_is_named_by_its_folder_or_by_its_checkpoint(tmp_path: Path, tokenizer: Any, case: str) -> None:
    first = build_ppo(tmp_path, tokenizer, **CASES[case])
    with torch.no_grad():
        for parameter in critic_parameters(first.model).values():
            parameter.add_(0.1)
    first.save_model(str(tmp_path / "checkpoint"))
    saved = weights(critic_parameters(first.model))
    for path in (tmp_path / "checkpoint", tmp_path / "checkpoint" / "critic"):
        second = build_ppo(tmp_path, tokenizer, **CASES[case], critic_model_name_or_path=str(path))
        assert not moved(saved, critic_parameters(second.model)), path
        if case == "head":
            with pytest.raises(ValueError, match="of kind 'head', but this run's is of kind 'model'"):
                build_ppo(tmp_path, tokenizer, critic="model", critic_model_name_or_path=str(path))


def test_a_value_model_is_one_of_any_width_loaded_as_the_policy_was(tmp_path: Path, tokenizer: Any) -> None:
    config = LlamaConfig(
        vocab_size=40, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaModel(config).save_pretrained(tmp_path / "large")
    options = {"attn_implementation": "eager", "revision": "v1"}
    trainer, before = trained(
        tmp_path, tokenizer, critic="model", critic_model_name_or_path=str(tmp_path / "large"), max_steps=2,
        model=saved_policy(tmp_path), model_init_kwargs=options,
    )  # fmt: skip
    assert trainer.critic.head.weight.shape == (1, 24)
    assert trainer.critic.backbone.config._attn_implementation == "eager"
    own = critic_parameters(trainer.model)
    assert moved(before, own) == own.keys()


def test_a_checkpoint_of_another_critic_or_of_none_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    trained_briefly(tmp_path, tokenizer, **EVERY_STEP, critic="model", lora=True, max_steps=1)
    again = build_ppo(tmp_path, tokenizer, **SMALL_ROLLOUTS, **CASES["adapter"], max_steps=4)
    with pytest.raises(ValueError, match="of kind 'model'"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    shutil.rmtree(tmp_path / "checkpoint-1" / "critic")
    with pytest.raises(ValueError, match=r"There is no critic in .*checkpoint-1"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


IA3 = IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"method": {"credit": "leave_one_out"}}, r"`credit` of `method` is LeaveOneOut\(\).*`GAE\(\)`"),
        ({"critic_learning_rate": 0.01}, "`critic_learning_rate` is 0.01"),  # a head has no other rate
        ({"critic": "adapter"}, "`critic='adapter'` needs a PEFT model"),
        ({"peft_config": IA3}, "IA3Config"),
        ({"critic": "model", "critic_model_name_or_path": "small"}, "vocabulary of 20"),
        ({"critic": "model", "model": None}, "`critic_model_name_or_path`"),  # nowhere to start from
        ({**CASES["adapter"], "critic_model_name_or_path": "policy"}, "has no critic"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, tokenizer: Any, given: dict[str, Any], named: str
) -> None:
    build_policy(vocab_size=20).save_pretrained(tmp_path / "small")
    saved_policy(tmp_path)
    if "critic_model_name_or_path" in given:
        given = {**given, "critic_model_name_or_path": str(tmp_path / given["critic_model_name_or_path"])}
    if "model" in given:
        given = {**given, "model": build_policy()}
    with pytest.raises(ValueError, match=named):
        build_ppo(tmp_path, tokenizer, **given)


def test_schedulers_and_policies_that_do_not_fit_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    """A scheduler without the critic, one that looks at the loss; a policy that has a critic, a frozen one."""
    model = build_policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(ValueError, match="`optimizers` has a scheduler"):
        build_ppo(tmp_path, tokenizer, model=model, optimizers=(optimizer, scheduler))
    plateau = build_ppo(
        tmp_path, tokenizer, critic_warmup_steps=2, lr_scheduler_type="reduce_lr_on_plateau",
        eval_strategy="steps", eval_steps=1, num_generations_eval=1, eval_dataset=[{"prompt": "w1"}],
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"`critic_warmup_steps` is 2, but the ReduceLROnPlateau"):
        plateau.train()
    with pytest.raises(ValueError, match="already has a critic"):
        build_ppo(tmp_path, tokenizer, model=plateau.model, critic="head")
    get_peft_model(build_policy(), lora_config()).save_pretrained(tmp_path / "adapter")
    frozen = PeftModel.from_pretrained(build_policy(), tmp_path / "adapter")
    with pytest.raises(ValueError, match="`is_trainable=True`"):
        build_ppo(tmp_path, tokenizer, model=frozen)


# ---------------------------------------------------------------------------------------------------------------------
# Together with TRL and the collector
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["head", "adapter", "model_lora"])
def test_vllm_is_sent_the_policy_alone(
    tmp_path: Path, tokenizer: Any, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VLLMGeneration, "_init_vllm", lambda self: None)
    trainer = build_ppo(tmp_path, tokenizer, **CASES[case], use_vllm=True, vllm_mode="colocate")
    set_head(trainer)
    for parameter in critic_parameters(trainer.model).values():
        parameter.data.add_(1.0)  # none of which may get into what is merged
    sent = {name: tensor.clone() for name, tensor in trainer.vllm_generation._iter_named_params()}
    plain = build_policy()
    assert sent.keys() == dict(plain.named_parameters()).keys()
    trainer.model.eval()
    ids = torch.tensor([[4, 9, 5]])
    expected = trainer.model(input_ids=ids).logits
    plain.load_state_dict(sent)
    torch.testing.assert_close(plain(input_ids=ids).logits, expected, rtol=0, atol=1e-5)
