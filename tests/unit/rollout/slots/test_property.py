"""Whatever comes when, how long, and with how much memory: the turns are those of lock-step."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from sorl_trl.rollout import HFGenerator, LockStepEngine, TurnEnd
from sorl_trl.rollout.slots import SlotEngine
from tests import model_families as families
from tests.unit.rollout.fakes import bpe_tokenizer

GREEDY = GenerationConfig(do_sample=False)
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
