"""Every layout of a pass against one plain pass of the model over each context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from peft import PromptTuningConfig
from torch import Tensor
from trl import GRPOTrainer

from sorl_trl.trainers.critic import CRITIC_ATTRIBUTE, causal_lm_of
from sorl_trl.trainers.forward import LaidOut
from sorl_trl.trainers.layouts import IN_SEGMENTS, LAYOUTS, attend_in_segments
from tests import model_families as families
from tests.agents import build_agent
from tests.critics import build_ppo, policy_with, rollout_batch, set_head
from tests.model_families import GEMMA, GQA, MIXED, WINDOW
from tests.passes import (
    BATCH,
    IN_SINGLE,
    LENGTH,
    SCORED,
    asked,
    detached,
    forward_of,
    one_by_one,
    warnings_of,
    whole,
    with_head,
)

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": families.SERVED["llama"],
    "qwen2": families.SERVED["qwen2"],
    "qwen3": families.SERVED["qwen3"],
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**GEMMA, **WINDOW, **MIXED)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GQA, **WINDOW)),
    "gpt2": families.SERVED["gpt2"],
    "qwen3_moe": families.SERVED["qwen3_moe"],
}


def laid_out(model: Any, layout: str, with_values: bool = False) -> dict[str, Tensor]:
    """The results of a pass in a layout, in TRL's two chunks of rows."""
    ids, mask = whole(BATCH)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-LENGTH] = -100
    asked = LaidOut(model, model, [layout], SCORED, BATCH["context_ids"], with_values)
    outputs = [
        asked(input_ids=ids[rows], attention_mask=mask[rows], labels=labels[rows], fused_lm_head=True)
        for rows in (slice(0, 2), slice(2, 3))
    ]
    found = {"logps": torch.cat([each.log_probs for each in outputs]).double()}
    found["entropies"] = torch.cat([each.entropy for each in outputs]).double()
    found["values"] = torch.cat(asked.values).double() if with_values else torch.zeros_like(found["logps"])
    return {name: each[:, -LENGTH:] for name, each in found.items()}


def gradients(found: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Of a loss of all that a pass has found, with weights by token."""
    weights = torch.randn(3, *SCORED.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    sum((of * each).sum() for of, each in zip(weights, found.values(), strict=True)).backward()  # type: ignore[union-attr]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_computes_what_plain_passes_do(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """And a trainer's first pass finds that it does."""
    model = families.build(FAMILIES[family])
    plain = one_by_one(model)
    expected = gradients(plain, model)
    forward = forward_of(with_head(model, packs=False))
    found = asked(forward, model, rows=2)
    assert forward.layouts == LAYOUTS and forward.reason is None and not warnings_of(caplog)
    torch.testing.assert_close(found, detached({name: plain[name] for name in found}), **IN_SINGLE)
    for layout in LAYOUTS:
        found = laid_out(model, layout)
        torch.testing.assert_close(detached(found), detached(plain), **IN_SINGLE)
        ours = gradients(found, model)
        assert ours.keys() == expected.keys()
        for name, gradient in expected.items():
            scale = max(gradient.abs().max().item(), 1e-6)
            torch.testing.assert_close(ours[name] / scale, gradient / scale, rtol=0, atol=1e-4, msg=name)


def critic_of(model: Any) -> Any:
    return getattr(causal_lm_of(model), CRITIC_ATTRIBUTE)


def plain_value(model: Any, kind: str, text: Tensor) -> Tensor:
    critic = critic_of(model)
    if kind == "model":
        return critic.head(critic.backbone(input_ids=text).last_hidden_state)
    if kind == "adapter":
        with critic.active():
            return critic.head(causal_lm_of(model).base_model(input_ids=text).last_hidden_state)
    hidden = causal_lm_of(model).base_model(input_ids=text).last_hidden_state
    return critic.head(hidden.detach())


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("kind", ["head", "adapter", "model"])
def test_values_are_those_of_plain_passes(kind: str, checkpointing: bool) -> None:
    model, critic = policy_with(kind)
    model.double()
    plain = one_by_one(model, lambda text: plain_value(model, kind, text))
    assert plain["values"].std() > 0.01
    expected = gradients(plain, model)
    attend_in_segments(causal_lm_of(model))
    if kind == "model":
        attend_in_segments(critic.backbone)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for layout in LAYOUTS:
        found = laid_out(model, layout, with_values=True)
        torch.testing.assert_close(detached(found), detached(plain), **IN_SINGLE)
        torch.testing.assert_close(gradients(found, model), expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# What a trainer's models can do
# ---------------------------------------------------------------------------------------------------------------------


def trls(trainer: Any, model: Any, batch: dict[str, Tensor], **options: Any) -> Any:
    """TRL's log-probabilities, entropies and router loss of a batch."""
    length = batch["completion_ids"].size(1)
    return GRPOTrainer._get_per_token_logps_and_entropies(trainer, model, *whole(batch), length, **options)


@pytest.mark.trains
def test_every_model_of_a_trainer_attends_in_segments(tmp_path: Path, tokenizer: Any) -> None:
    """Policy, reference and critic: one that did not would mix trajectories."""
    trainer = build_ppo(tmp_path, tokenizer, critic="model", beta=0.1)
    models = trainer.model, trainer.ref_model, trainer.critic.backbone
    assert {each.config._attn_implementation for each in models} == {IN_SEGMENTS}
    set_head(trainer)
    batch = rollout_batch(trainer)
    assert trainer._forward.layouts == LAYOUTS
    alone = [{name: each[row : row + 1] for name, each in batch.items() if name in BATCH} for row in range(4)]
    with torch.no_grad():
        values = torch.cat([trainer._forward(trainer.model, row, values=True).values for row in alone])
    kept = batch["turn_ids"][:4] >= 0
    torch.testing.assert_close(values[kept], batch["old_values"][:4][kept], **IN_SINGLE)
    assert values[kept].std() > 0.01


def test_several_gpus_of_one_process_are_refused() -> None:
    with pytest.raises(ValueError, match="One process has 2 GPUs"):
        forward_of(families.build(FAMILIES["llama"]), n_gpu=2)


def prompts_and(completions: Sequence[Sequence[int]], prompt: int = 4) -> dict[str, Tensor]:
    """Rows of the same prompt with these completions."""
    width = max(map(len, completions))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in completions])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in completions])
    prompts = torch.arange(4, 4 + prompt).expand(len(ids), prompt)
    names = "prompt_ids", "prompt_mask", "completion_ids", "completion_mask"
    return dict(zip(names, (prompts, torch.ones_like(prompts), ids, mask), strict=True))


@pytest.mark.parametrize(
    ("completions", "prompt", "shape"),
    [
        ([[5] * 9, [6] * 9], 1, (2, 10)),  # nothing to gain
        ([[5] * 9, [6] * 2], 1, (1, 2 + 9 + 2)),  # one word less is no gain
        ([[5] * 9, [6] * 9], 4, (1, 4 + 18)),  # the prompt is read once
        ([[5] * 9, [5] * 2], 1, (1, 10)),  # and so is a completion that another one begins with
    ],
    ids=["as long", "uneven", "one prompt", "one beginning"],
)
def test_the_model_reads_as_few_tokens_as_it_can(
    completions: list[list[int]], prompt: int, shape: tuple[int, ...]
) -> None:
    model = with_head(families.build(FAMILIES["llama"]), packs=False)
    forward, batch = forward_of(model), prompts_and(completions, prompt)
    forward(model, batch)  # tries layouts out
    seen: list[tuple[int, ...]] = []
    model.base_model.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    forward(model, batch)
    assert seen == [shape]


def test_positions_that_depend_on_the_width_keep_it() -> None:
    """As in TRL: all rows are as wide as the batch, where frequencies follow the longest row."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    config = hf.LlamaConfig(**{**GQA, "max_position_embeddings": 16, "rope_parameters": rope})
    model = families.build(lambda: hf.LlamaForCausalLM(config))
    again = with_head(families.build(lambda: hf.LlamaForCausalLM(config)), packs=False)  # it remembers the longest
    forward = forward_of(with_head(model, packs=False))
    batch = {name: each for name, each in BATCH.items() if name != "context_ids"}
    found = asked(forward, model, batch)
    assert "dynamic" in str(forward.reason)
    theirs, _, _ = trls(forward._host.trainer, again, batch)
    torch.testing.assert_close(found["logps"], torch.where(SCORED, theirs, 0.0).double(), **IN_SINGLE)


@pytest.mark.trains
def test_prompt_tuning_is_scored_as_by_trl(tmp_path: Path) -> None:
    """Its virtual tokens stand before the prompt, so that hidden states have more columns than labels."""
    trainer = build_agent(tmp_path, peft_config=PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    batch = prompts_and([[3, 5, 6], [4]])
    theirs, _, _ = trls(trainer, trainer.model, batch)
    kept = batch["completion_mask"].bool()
    torch.testing.assert_close(trainer._forward(trainer.model, batch).logps[kept], theirs[kept])


def test_the_router_loss_is_that_of_the_tokens() -> None:
    """As in TRL, where each row is a context; a config that asks for it is not heard otherwise."""
    model = with_head(families.build(FAMILIES["qwen3_moe"]), packs=False)
    forward, batch = forward_of(model), prompts_and([[5] * 9, [6] * 2])
    _, _, theirs = trls(forward._host.trainer, model, batch, compute_aux_loss=True)
    torch.testing.assert_close(forward(model, batch, router=True).aux_loss, theirs)
    model.config.output_router_logits = True
    assert forward(model, batch).aux_loss is None
