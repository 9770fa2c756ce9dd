"""Slots against `model.generate`, on every family that a tiny config can build; and which models they refuse."""

from __future__ import annotations

import copy
from functools import cache, wraps
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from sorl_trl.rollout import HFGenerator, LockStepEngine, TurnEnd
from sorl_trl.rollout.engines.slots import NotServed, SlotEngine, model_engine
from tests import model_families as families
from tests.unit.rollout.fakes import bpe_tokenizer

GREEDY = GenerationConfig(do_sample=False)
SAMPLED = GenerationConfig(do_sample=True, top_k=0)


def slots(model: Any, config: GenerationConfig = GREEDY, **options: Any) -> SlotEngine:
    return SlotEngine(model, families.turn_end(), config, **options)


def lock_step(model: Any) -> LockStepEngine:
    end = families.turn_end()
    return LockStepEngine(HFGenerator(model, end.tokenizer, end.stop_strings, GREEDY, end.eos_token_ids))


@pytest.fixture
def llama() -> Any:
    return families.build(families.SERVED["llama"])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", families.SERVED)
def test_greedy_turns_are_those_of_lock_step(family: str, attention: str) -> None:
    model = families.build(families.SERVED[family])
    model.set_attn_implementation(attention)
    if attention == "eager":
        model.float()  # transformers takes its softmax in float32, where float64's mask becomes NaN
    plan = families.random_plan()
    engine, reference = slots(model, prefill_tokens=16), lock_step(model)
    played = families.play(engine, plan)
    assert played == families.play(reference, plan)
    turns = [turn for row in played for _, turn in row]
    if family not in ("gpt2", "qwen3_moe"):
        assert len({turn.stopped for turn in turns}) == 2, "turns that stop and turns that reach their limit"
    assert engine.prefilled_tokens < reference.prefilled_tokens / 2


@pytest.mark.parametrize("family", families.REFUSED)
def test_what_would_differ_is_refused(family: str) -> None:
    make, reason = families.REFUSED[family]
    with pytest.raises(NotServed, match=reason):
        slots(families.build(make))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"_attn_implementation_internal": "flash_attention_2"}, "attn_implementation='flash_attention_2'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, r"rotary positions \(dynamic\)"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, r"rotary positions \(longrope\)"),
        ({"rope_parameters": {"mrope_section": [1, 1, 2]}}, "several dimensions"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}, "DynamicSlidingWindowLayer"),
    ],
)
def test_what_a_config_shows_is_refused(llama: Any, change: dict[str, Any], reason: str) -> None:
    for name, value in change.items():
        setattr(llama.config, name, value)
    with pytest.raises(NotServed, match=reason):
        slots(llama)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.2},
        {"cache_implementation": "static"},
        {"an_option_of_next_year": 1},
    ],
)
def test_options_that_need_generate_are_refused(llama: Any, options: dict[str, Any]) -> None:
    name = next(iter(options))
    with pytest.raises(NotServed, match=f"generation_config.{name}="):
        slots(llama, GenerationConfig(do_sample=True, **options))
    setattr(llama.generation_config, name, options[name])
    with pytest.raises(NotServed, match=f"generation_config.{name}="):
        slots(llama, SAMPLED)


class OwnGenerate(LlamaForCausalLM):
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return super().generate(*args, **kwargs)


class NoCache(LlamaForCausalLM):
    @wraps(LlamaForCausalLM.forward)
    def forward(self, input_ids: Any, **kwargs: Any) -> Any:
        return super().forward(input_ids)


class OwnMask(LlamaForCausalLM):
    @wraps(LlamaForCausalLM.forward)
    def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (OwnGenerate, "OwnGenerate overrides `generate`"),
        (NoCache, "does not use the cache"),
        (OwnMask, "computes different logits with slots"),
    ],
)
def test_what_only_a_forward_shows_is_refused(llama: Any, kind: Any, reason: str) -> None:
    llama.__class__ = kind
    with pytest.raises(NotServed, match=reason):
        slots(llama)


def test_lora_and_its_generation_config(llama: Any) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.5)
    plain = families.play(slots(llama), families.random_plan())
    torch.manual_seed(1)
    model = get_peft_model(llama, lora).eval()
    plan = families.random_plan()
    played = families.play(slots(model), plan)
    assert played == families.play(lock_step(model), plan)
    assert played != plain
    model.generation_config.repetition_penalty = 1.5
    with pytest.raises(NotServed, match="repetition_penalty"):
        slots(model)


def test_the_choice(llama: Any) -> None:
    end = families.turn_end()
    assert isinstance(model_engine(llama, end, GREEDY), SlotEngine)
    assert isinstance(model_engine(llama, end, GREEDY, "lockstep"), LockStepEngine)
    assert isinstance(model_engine(copy.deepcopy(llama).to("meta"), end, GREEDY), LockStepEngine), "slow on a GPU"
    refused = families.build(families.REFUSED["mistral"][0])
    assert isinstance(model_engine(refused, end, GREEDY), LockStepEngine)
    assert isinstance(model_engine(llama, end, GREEDY, synced_gpus=True), LockStepEngine)
    for name, model in (("slots", refused), ("fast", llama)):
        with pytest.raises(ValueError, match="engine"):
            model_engine(model, end, GREEDY, name)


TOKENIZER = bpe_tokenizer()
# Ends that tokens such as `>\\n\\n`, `search` and `capital` hold with more behind it, or have only a part of.
STOPS = st.lists(st.sampled_from([">", "ch", "ea", "capi", "\n", "i", "w>", "é"]), max_size=3, unique=True)
IDS = st.lists(st.integers(3, len(TOKENIZER) - 1), max_size=6)


@cache
def policy() -> Any:
    shape = {**families.GQA, "vocab_size": len(TOKENIZER)}
    return families.build(lambda: LlamaForCausalLM(LlamaConfig(**shape)))


@st.composite
def plans(draw: st.DrawFn) -> families.Plan:
    prompts = draw(st.lists(IDS.filter(bool), min_size=1, max_size=2))
    rows, turns = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    by_turn = {"min_size": turns, "max_size": turns}
    return families.Plan(
        prompts=[draw(st.sampled_from(prompts)) for _ in range(rows)],
        observations=[draw(st.lists(IDS, **by_turn)) for _ in range(rows)],
        limits=[draw(st.lists(st.integers(1, 8), **by_turn)) for _ in range(rows)],
        delays=[draw(st.lists(st.integers(0, 5), **by_turn)) for _ in range(rows)],
    )


@settings(max_examples=25)
@given(plan=plans(), stops=STOPS, prefill_tokens=st.integers(1, 30), cache_tokens=st.integers(64, 300))
def test_turns_are_those_of_lock_step(
    plan: families.Plan, stops: list[str], prefill_tokens: int, cache_tokens: int
) -> None:
    end = TurnEnd(TOKENIZER, stops, [TOKENIZER.eos_token_id])
    options: Any = {"cache_bytes": 256 * cache_tokens, "prefill_tokens": prefill_tokens}
    engine = SlotEngine(policy(), end, GREEDY, **options)
    reference = LockStepEngine(HFGenerator(policy(), TOKENIZER, stops, GREEDY, end.eos_token_ids))
    played = families.play(engine, plan)
    assert played == families.play(reference, plan)
