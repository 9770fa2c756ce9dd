"""Which models read texts without padding, how the first pass finds those that must not; and what plans read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sorl_trl.trainers import layouts
from sorl_trl.trainers.layouts import LAYOUTS, plan_of
from tests import model_families as families
from tests.critics import policy_with
from tests.model_families import GQA, MIXED
from tests.passes import IN_SINGLE, asked, detached, forward_of, one_by_one, warnings_of, with_head

LINEAR = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
SINKS = {"layer_types": ["full_attention"] * 2}
FAILS = "it fails without padding"
UNFOLDED: dict[str, tuple[Callable[[], Any], str]] = {
    "qwen3_next": (lambda: hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**GQA, **LINEAR)), "linear_attention"),
    "lfm2": (lambda: hf.Lfm2ForCausalLM(hf.Lfm2Config(**GQA, layer_types=["conv", "full_attention"])), "conv"),
    "gpt_oss": (
        lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**GQA, head_dim=8, num_local_experts=4, **SINKS)),
        "'eager'",
    ),
    "rwkv": (lambda: families.tiny("rwkv"), "its layers have a state"),
    "nemotron": (lambda: families.tiny("nemotron"), FAILS),
    "qwen2_moe": (lambda: families.tiny("qwen2_moe", **MIXED), FAILS),
    "phimoe": (lambda: families.tiny("phimoe"), FAILS),
    "doge": (lambda: families.tiny("doge"), FAILS),
}
"""Those that do not pack, and a part of the reason. Nemotron drops the segments; the last three need a mask."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["single", "half"])
@pytest.mark.parametrize("family", [*UNFOLDED, "qwen3_next bypassed"])
def test_these_read_padded_rows(
    family: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their class or config shows it, or a layer fails; if neither did, the first pass would find out."""
    make, reason = UNFOLDED[family.split()[0]]
    model = families.build(make).to(dtype)
    if "bypassed" in family:
        monkeypatch.setattr("sorl_trl.trainers.forward.why_not_packed", lambda _: None)
        reason = "off by"
    plain = detached(one_by_one(model))
    forward = forward_of(with_head(model, packs=False))
    found = asked(forward, model)
    assert forward.layouts == ("unfolded",)
    assert forward.reason is not None and reason in forward.reason
    assert ["Results are correct" in text for text in warnings_of(caplog)] == [True]
    if dtype == torch.float32:
        torch.testing.assert_close(found, {name: plain[name] for name in found}, rtol=1e-3, atol=1e-3)


def is_packed(model: Any) -> bool | None:
    """Whether a model reads texts without padding, in both precisions, and rightly; None if it is refused."""
    try:
        forward = forward_of(with_head(model, packs=False))
    except ValueError as refused:
        assert "is bidirectional" in str(refused)
        return None
    if forward.reason is not None:
        return False
    found = asked(forward, model)
    torch.testing.assert_close(found, asked(forward, model, layouts=["unfolded"]), **IN_SINGLE)
    half = forward_of(model.bfloat16())
    asked(half, model)
    assert half.layouts == forward.layouts
    return forward.reason is None


def test_no_family_is_packed_that_mixes_texts() -> None:
    """Every causal language model of transformers that a tiny config builds."""
    packs = {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            model = families.build(partial(families.tiny, kind))
        except Exception:  # of many classes, if its parts want configs of their own
            continue
        packs[kind] = is_packed(model)
    found = [*packs.values()]
    assert found.count(True) > 65 and found.count(False) > 60 and found.count(None) > 10
    known = {"mistral": True, "gemma3_text": True, "nemotron": False, "bert": None, "rembert": None}
    assert {kind: packs[kind] for kind in known} == known


CAUSAL = layouts._causal
"""Attention of queries to keys and values, with dropout, scale and window."""


def without_window(q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float | None, window: int | None) -> Tensor:
    return CAUSAL(q, k, v, dropout, scale, None)


def without_prefix(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return CAUSAL(q, k[:, :, -q.size(2) :], v[:, :, -q.size(2) :], *others)


def not_a_number(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return CAUSAL(q, k, v, *others) * (1.0 if k.size(2) == q.size(2) else torch.nan)


def wrong_at_the_beginning(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return CAUSAL(q, k, v, *others) * (1 + 2.0 * (torch.arange(q.size(2)) < 5)[:, None])


def slightly_wrong_past_the_window(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return CAUSAL(q, k, v, *others) * (1 + 1e-3 * (torch.arange(q.size(2)) >= 44)[:, None])


WRONG = without_window, without_prefix, not_a_number, wrong_at_the_beginning, slightly_wrong_past_the_window


def mistral(window: int, layers: int = 2) -> Any:
    config = hf.MistralConfig(**{**GQA, "num_hidden_layers": layers, "sliding_window": window})
    return with_head(families.build(lambda: hf.MistralForCausalLM(config)), packs=False)


@pytest.mark.parametrize(
    ("wrong", "dtype"), [*((each, torch.float64) for each in WRONG), *((each, torch.bfloat16) for each in WRONG[:2])]
)
def test_wrong_attention_is_found(
    wrong: Callable[..., Tensor], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts are longer than the window; and one layout that is wrong at some tokens is enough."""
    monkeypatch.setattr(layouts, "_causal", wrong)
    model = mistral(window=40, layers=1).to(dtype)
    forward = forward_of(model)
    asked(forward, model)
    assert forward.layouts == ("unfolded",) and "off by" in str(forward.reason)


def test_wrong_values_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a critic with a model of its own, where the policy's own attention adds nothing."""
    monkeypatch.setattr(layouts, "_causal", without_prefix)
    model, _ = policy_with("model")
    for layer in model.base_model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    forward = forward_of(model)
    asked(forward, model)
    assert forward.layouts == ("unfolded",) and "off by" in str(forward.reason)


@pytest.mark.parametrize("window", [40, 4096])
def test_texts_exceed_a_window_if_they_may(window: int) -> None:
    """Otherwise, it is enough that the window arrives."""
    model, seen = mistral(window), []
    forward = forward_of(model)
    model.base_model.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    asked(forward, model)
    assert forward.layouts == LAYOUTS and max(seen) < 300


# ---------------------------------------------------------------------------------------------------------------------
# Plans
# ---------------------------------------------------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(B, W) ids of few words, so that texts begin alike; a mask, what is scored, and contexts, without any order."""
    rows, width = draw(st.integers(1, 3)), draw(st.integers(1, 9))

    def numbers(least: int, most: int) -> Tensor:
        row = st.lists(st.integers(least, most), min_size=width, max_size=width)
        return torch.tensor(draw(st.lists(row, min_size=rows, max_size=rows)))

    mask = numbers(0, 1)
    mask[0, 0] = 1  # a batch has a token
    return numbers(1, 2), mask, numbers(0, 1).bool(), numbers(0, 3)


def test_padded_rows_predict_tokens_from_tokens() -> None:
    """Neither padding, nor a token after padding, nor what is not scored."""
    mask, scored = torch.tensor([[0, 1, 1, 1, 0, 1]]), torch.tensor([[1, 1, 1, 0, 1, 1]]).bool()
    plan = plan_of(torch.arange(6)[None], mask, scored, layouts=["rows"])
    assert (plan.predictors.tolist(), plan.targets.tolist()) == ([1], [2])


@pytest.mark.parametrize("layout", LAYOUTS)
@given(given_=batches())
def test_any_assignment_of_contexts(layout: str, given_: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    """Each scored token is predicted by a position that reads its context up to it, and nothing else."""
    ids, mask, scored, contexts = given_
    plan = plan_of(ids, mask, scored, contexts, [layout])
    expected, beginnings = {}, set()
    for row in range(len(ids)):
        for context in range(4):
            places = [i for i in range(ids.size(1)) if mask[row, i] and contexts[row, i] == context]
            for before, place in enumerate(places):
                beginnings.add(tuple(ids[row, places[: before + 1]].tolist()))
                if scored[row, place] and before:
                    expected[row * ids.size(1) + place] = ids[row, places[:before]].tolist(), int(ids[row, place])
    assert sorted(plan.targets.tolist()) == sorted(expected)
    if layout == "tree":  # which reads each beginning once
        assert plan.input_ids.numel() == len(beginnings)
    if not expected:
        assert plan.labels.tolist() == [[-100]]
        return
    for place, predictor, label in zip(plan.targets, plan.predictors, plan.labels[0], strict=True):
        assert (text_at(plan, int(predictor)), int(label)) == expected[int(place)]
    found = torch.arange(1.0, len(expected) + 1)
    scattered = plan.scatter(found[None], ids).flatten()
    assert scattered[plan.targets].tolist() == found.tolist()
    assert scattered.count_nonzero() == len(expected)


def text_at(plan: Any, position: int) -> list[int]:
    """What the model has read at a flat position of a plan."""
    if plan.segments is None:
        row, column = divmod(position, plan.input_ids.size(1))
        assert plan.attention_mask[row, : column + 1].all()
        return plan.input_ids[row, : column + 1].tolist()
    lengths, before = plan.segments.lengths, plan.segments.before or ((),) * len(plan.segments.lengths)
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert plan.segments.bounds.tolist() == bounds
    own = next(i for i, end in enumerate(bounds[1:]) if position < end)
    ids, places = plan.input_ids[0], plan.position_ids[0]
    whole = [i for each in before[own] for i in range(bounds[each], bounds[each + 1])]
    whole += range(bounds[own], position + 1)
    assert places[whole].tolist() == list(range(len(whole)))
    return ids[whole].tolist()
