"""What the policy's passes say of completions is the same, with padding and prompts and without."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PromptTuningConfig
from torch import Tensor
from transformers import LlamaConfig
from trl import GRPOTrainer

from sorl_trl.trainers.critic.model import ValuesBesideLogps
from sorl_trl.trainers.no_padding import CompletionsAlone, NoPadding, width_matters
from tests.agents import build_agent
from tests.critics import policy_with

PROMPT, COMPLETION = 5, 6


def inputs(prompts: list[int], completions: list[int]) -> dict[str, Tensor]:
    """Rows with so many tokens in prompt and completion: the one padded on the left, the other on the right."""
    ids = torch.randint(4, 32, (len(prompts), PROMPT + COMPLETION), generator=torch.Generator().manual_seed(5))
    columns = torch.arange(PROMPT + COMPLETION)
    first, end = PROMPT - torch.tensor(prompts).unsqueeze(1), PROMPT + torch.tensor(completions).unsqueeze(1)
    mask = ((columns >= first) & (columns < end)).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :PROMPT] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def said(given: dict[str, Tensor], kind: str, cut: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], list[int]]:
    """What is said of the completions' tokens, the gradients of a loss of it, and how wide the inputs were."""
    policy, _ = policy_with(kind)
    widths: list[int] = []
    hook = policy.base_model.register_forward_pre_hook(
        lambda _module, _args, kwargs: widths.append(kwargs["input_ids"].size(1)), with_kwargs=True
    )
    beside: Any = ValuesBesideLogps(policy)
    output = (NoPadding(CompletionsAlone(beside, policy, PROMPT), PROMPT) if cut else beside)(
        **given, fused_lm_head=True
    )
    hook.remove()
    kept = given["attention_mask"][:, PROMPT:].bool()
    of_tokens = {name: output[name][:, -COMPLETION:] for name in ("log_probs", "entropy")}
    of_tokens = {name: each[kept] for name, each in {**of_tokens, "values": beside.values(COMPLETION)}.items()}
    sum(each.square().sum() for each in of_tokens.values()).backward()  # type: ignore[union-attr]
    return of_tokens, {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}, widths


@pytest.mark.parametrize("kind", ["head", "trunk", "adapter", "model"])
@given(rows=st.lists(st.tuples(st.integers(1, PROMPT), st.integers(0, COMPLETION)), min_size=1, max_size=3))
def test_logps_values_and_gradients_are_those_of_the_whole(kind: str, rows: list[tuple[int, int]]) -> None:
    prompts, completions = (list(each) for each in zip(*rows, strict=True))
    given = inputs(prompts, completions)
    whole, gradients_of_whole, _ = said(given, kind, cut=False)
    tokens, gradients, widths = said(given, kind, cut=True)
    torch.testing.assert_close(tokens, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients, gradients_of_whole, rtol=1e-3, atol=1e-4)
    assert {*widths} == {PROMPT + max(*completions, 1)}


def test_heads_read_completions_alone() -> None:
    policy, _ = policy_with("head")
    output = CompletionsAlone(policy, policy, PROMPT)(**inputs([5, 3], [6, 2]), fused_lm_head=True)
    assert output.log_probs.shape == (2, COMPLETION)
    assert policy(input_ids=inputs([5], [6])["input_ids"]).logits.shape[1] == PROMPT + COMPLETION, "a hook was left"


def test_inputs_of_images_stay_as_wide_as_they_are() -> None:
    seen: list[int] = []

    def model(input_ids: Tensor, **_: Any) -> Any:
        seen.append(input_ids.size(1))

    NoPadding(model, PROMPT)(**inputs([5], [2]), token_type_ids=torch.zeros(1, PROMPT + COMPLETION))
    assert seen == [PROMPT + COMPLETION]


def test_prompt_tuning_is_scored_as_by_trl(tmp_path: Path) -> None:
    """Its virtual tokens stand before the prompt, so that hidden states have more columns than labels."""
    virtual = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    given = inputs([5, 3], [6, 2])
    trainer = build_agent(tmp_path, peft_config=virtual)
    ids = given["input_ids"] % trainer.model.config.vocab_size
    asked = trainer.model, ids, given["attention_mask"], COMPLETION
    ours, _, _ = trainer._get_per_token_logps_and_entropies(*asked)
    theirs, _, _ = GRPOTrainer._get_per_token_logps_and_entropies(trainer, *asked)
    kept = given["attention_mask"][:, PROMPT:].bool()
    torch.testing.assert_close(ours[kept], theirs[kept])


@pytest.mark.parametrize(
    ("rotary", "matters"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0] * 2, "long_factor": [4.0] * 2}, True),
        ({"rope_type": "dynamic"}, True),
        ({"rope_type": "linear"}, False),
        ({"rope_type": "default"}, False),
    ],
    ids=lambda each: each["rope_type"] if isinstance(each, dict) else "",
)
def test_positions_that_depend_on_the_width_keep_it(rotary: dict[str, Any], matters: bool) -> None:
    rotary = {**rotary, "rope_theta": 1e4, "factor": 2.0}
    config = LlamaConfig(vocab_size=32, hidden_size=16, num_attention_heads=4, rope_parameters=rotary)
    assert width_matters(SimpleNamespace(config=config)) is matters
