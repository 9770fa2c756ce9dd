"""The slot engine: its turns are those of `model.generate`, on every family that a tiny config can build.

And what it keeps, shares and gives back, which models it refuses, which token comes next, and the experts that it
reports.
"""

from __future__ import annotations

import copy
import gc
import logging
import sys
import threading
import weakref
from functools import cache, wraps
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessorList

from sorl_trl.rollout import (
    EngineOptions,
    Generation,
    HFGenerator,
    LockStepEngine,
    TurnEnd,
    TurnRequest,
    generate_turns,
)
from sorl_trl.rollout.engines.slots import NotServed, SlotEngine, model_engine
from sorl_trl.rollout.engines.slots import engine as engine_module
from sorl_trl.rollout.engines.slots.engine import Sampler
from sorl_trl.rollout.engines.slots.support import resolved
from sorl_trl.rollout.routing import Routers
from tests import model_families as families
from tests.policies import play_turns
from tests.unit.rollout.fakes import bpe_tokenizer

GREEDY = GenerationConfig(do_sample=False)
SAMPLED = GenerationConfig(do_sample=True, temperature=1.0, top_k=0)
BYTES = 2 * 2 * 2 * 8 * 8  # of a token: layers, keys and values, heads, head size, bytes
PROMPT = [4, 5, 6, 7, 8]


@pytest.fixture
def llama() -> Any:
    return families.build(families.SERVED["llama"])


def slots(model: Any, config: GenerationConfig = GREEDY, **options: Any) -> SlotEngine:
    return SlotEngine(model, families.turn_end(), config, **options)


def opened(model: Any, rows: int, **options: Any) -> SlotEngine:
    engine = slots(model, **options)
    engine.open(rows)
    return engine


def lock_step(model: Any) -> LockStepEngine:
    return LockStepEngine(HFGenerator(model, families.turn_end(), GREEDY))


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
    assert isinstance(model_engine(llama, end, GREEDY, EngineOptions("lockstep")), LockStepEngine)
    assert isinstance(model_engine(copy.deepcopy(llama).to("meta"), end, GREEDY), LockStepEngine), "slow on a GPU"
    refused = families.build(families.REFUSED["mistral"][0])
    assert isinstance(model_engine(refused, end, GREEDY), LockStepEngine)
    assert isinstance(model_engine(llama, end, GREEDY, synced_gpus=True), LockStepEngine)
    with pytest.raises(NotServed, match="rollout_engine='slots'"):
        model_engine(refused, end, GREEDY, EngineOptions("slots"))


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
    reference = LockStepEngine(HFGenerator(policy(), end, GREEDY))
    played = families.play(engine, plan)
    assert played == families.play(reference, plan)


# ---------------------------------------------------------------------------------------------------------------------
# What is kept, shared and given back
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given_up", [True, False], ids=["another row", "the same row"])
def test_what_lies_behind_the_mask_changes_nothing(llama: Any, given_up: bool) -> None:
    """A token whose embedding is NaN spoils what its row leaves in a slot, where a shorter text follows."""
    long = [*range(5, 5 + 25)]
    expected = generate_turns(opened(llama, 2), [PROMPT, long], [4, 4])
    bad = min(set(range(families.VOCABULARY)) - {*PROMPT, *long, *(i for turn in expected for i in turn.token_ids)})
    with torch.no_grad():
        llama.model.embed_tokens.weight[bad] = torch.nan
    engine = opened(llama, 2)
    generate_turns(engine, [[bad] * 20, long], [4, 4])
    if given_up:
        engine.release(0)
    assert generate_turns(engine, [PROMPT, long], [4, 4], [2 if given_up else 0, 1]) == expected


def test_a_group_is_prefilled_once(llama: Any) -> None:
    engine = opened(llama, 6)
    turns = generate_turns(engine, [PROMPT] * 4 + [PROMPT[::-1]] * 2, [5] * 6)
    assert engine.prefilled_tokens == 2 * len(PROMPT)
    assert turns[0] == turns[3] and turns[4] == turns[5] != turns[0]
    prompts = [PROMPT] * 4 + [PROMPT[::-1]] * 2
    rest = [[*prompt, *turn.token_ids, 9, 10] for prompt, turn in zip(prompts, turns, strict=True)]
    again = generate_turns(engine, rest, [5] * 6)
    assert engine.prefilled_tokens == 2 * len(PROMPT) + 6 * 3, "the last token of a turn, and what follows it"
    fresh = opened(llama, 6)
    assert generate_turns(fresh, rest, [5] * 6) == again


def test_rows_wait_for_memory_and_this_is_logged_once(llama: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine_module._warn_once.cache_clear()
    plan = families.random_plan(rows=8)
    expected = families.play(slots(llama), plan)
    room = max(len(context) + 12 for row in expected for context, _ in row)
    for rows_at_once in (1, 2, 5):
        engine = slots(llama, cache_bytes=BYTES * room * rows_at_once)
        with caplog.at_level(logging.WARNING):
            assert families.play(engine, plan, close=False) == expected
        assert engine._table.cache.slots * engine._table.cache.capacity <= room * rows_at_once
    (message,) = caplog.messages
    assert "`kv_cache_gib`" in message


def test_a_row_s_samples_depend_on_no_other(llama: Any) -> None:
    engine = slots(llama, SAMPLED)

    def sampled(left_out: int | None = None, seed: int = 7) -> list[list[Any]]:
        torch.manual_seed(seed)
        cut = families.random_plan(rows=8, seed=5)
        if left_out is not None:
            cut.limits[left_out] = cut.limits[left_out][:1]
        return [[turn for _, turn in row] for row in families.play(engine, cut)]

    whole = sampled()
    assert whole == sampled() != sampled(seed=8)
    less = sampled(left_out=3)
    assert [row for i, row in enumerate(less) if i != 3] == [row for i, row in enumerate(whole) if i != 3]
    torch.manual_seed(7)
    fewer = families.random_plan(rows=8, seed=5)
    for each in (fewer.prompts, fewer.limits, fewer.observations, fewer.delays):
        each.pop()
    assert [[turn for _, turn in row] for row in families.play(engine, fewer)] == whole[:7]


def turns_with(engine: Any, stops: list[tuple[str, ...]]) -> list[Generation]:
    """A turn of each row, which has these stops, from one context."""
    return play_turns(engine, [TurnRequest(row, PROMPT, 30, own) for row, own in enumerate(stops)])


def test_each_row_of_a_poll_ends_at_its_own_stops(llama: Any) -> None:
    end = families.turn_end()
    (whole,) = turns_with(slots(llama), [()])
    early, later = (end.tokenizer.decode(whole.token_ids[i : i + 2]) for i in (1, 2))
    turns = turns_with(slots(llama), [(early,), (later, "unheard of"), ()])
    assert [len(turn.token_ids) for turn in turns] == [3, 4, 5]
    assert turns == turns_with(lock_step(llama), [(early,), (later, "unheard of"), ()])


def test_a_row_has_its_own_random_numbers_whenever_it_comes_and_never_the_same_again(llama: Any) -> None:
    """A late row, and one that is released after two tokens of a turn and goes on as after a turn of two."""

    def row_5(rows: int, *steps: Any) -> list[Any]:
        torch.manual_seed(7)
        engine = slots(llama, SAMPLED)
        engine.open(rows)
        return [step(engine) for step in steps]

    def turn(limit: int) -> Any:
        return lambda engine: generate_turns(engine, [PROMPT], [limit], [5])[0].token_ids

    def others(engine: SlotEngine) -> None:
        generate_turns(engine, [PROMPT] * 3, [4] * 3)

    def released(engine: SlotEngine) -> None:
        engine.submit(TurnRequest(5, PROMPT, 30))
        assert engine.poll() == []
        engine.release(5)
        assert engine.idle and engine.poll() == []

    two, then = row_5(9, turn(2), turn(8))
    assert len(two) == 2 and then[:2] != two
    assert row_5(1, others, turn(2), turn(8))[1:] == [two, then]
    assert row_5(1, released, turn(8))[1:] == [then]


def test_close_gives_memory_back(llama: Any) -> None:
    engine = opened(llama, 3)
    gc.disable()
    try:
        for row in range(3):
            engine.submit(TurnRequest(row, PROMPT[row:], 30))
        engine.poll()
        buffers = [weakref.ref(buffer) for buffer in engine._table.cache._tensors()]
        assert buffers and all(buffer() is not None for buffer in buffers)
        engine.close()
        assert all(buffer() is None for buffer in buffers), "nothing refers to them, not even in a circle"
    finally:
        gc.enable()
    assert engine.idle
    engine.open(1)
    assert generate_turns(engine, [PROMPT], [3]) == generate_turns(opened(llama, 1), [PROMPT], [3])


# ---------------------------------------------------------------------------------------------------------------------
# Which token comes next
# ---------------------------------------------------------------------------------------------------------------------


def sampler_of(**options: Any) -> Sampler:
    return Sampler(resolved(GenerationConfig(**options), policy()), policy())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 2.0, "top_k": 6, "top_p": 0.8, "min_p": 0.1},
    ],
)
def test_the_distribution_is_that_of_generate(options: dict[str, Any]) -> None:
    model: Any = families.build(families.SERVED["llama"])
    config = resolved(GenerationConfig(do_sample=True, **{"top_k": 0, **options}), model)
    processors: LogitsProcessorList = model._get_logits_processor(config)
    logits = torch.randn(1, 12) * 2
    expected = torch.softmax(processors(torch.zeros(1, 1, dtype=torch.long), logits.clone()), -1)[0]
    points = torch.linspace(0, 1, 20001)[:-1].tolist()
    tokens, _ = Sampler(config, model).choose(logits.expand(len(points), -1), points)
    shares = torch.bincount(torch.tensor(tokens), minlength=12) / len(points)
    torch.testing.assert_close(shares, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 3, "top_p": 0.6, "min_p": 0.2}, {"temperature": 2.0}, {"do_sample": False}]
)
def test_log_probabilities_are_among_all_tokens_at_the_temperature_that_is_asked_for(options: dict[str, Any]) -> None:
    """A trainer compares them with its own, which know no top-k."""
    logits, points = torch.randn(6, 12) * 2, [0.05, 0.2, 0.4, 0.6, 0.8, 0.99]
    sampler = sampler_of(**{"do_sample": True, "top_k": 0, **options})
    tokens, logprobs = sampler.choose(logits, points, logprobs_at=0.7)
    weights = (logits.double() / 0.7).exp()
    expected = [(weights[row, token] / weights[row].sum()).log().item() for row, token in enumerate(tokens)]
    assert logprobs == pytest.approx(expected, abs=1e-5)


def test_what_is_none_comes_from_the_model_and_then_from_the_defaults() -> None:
    model: Any = families.build(families.SERVED["llama"])
    model.generation_config.temperature = 0.3
    config = resolved(GenerationConfig(do_sample=True, top_p=0.9), model)
    expected, _ = model._prepare_generation_config(GenerationConfig(do_sample=True, top_p=0.9))
    assert config.to_dict() == expected.to_dict()
    assert (config.temperature, config.top_p, config.top_k) == (0.3, 0.9, 50)


def test_a_token_without_probability_is_never_chosen() -> None:
    """Not at the ends either, whatever rounding does."""
    sampler = sampler_of(do_sample=True, top_k=0)
    for size in (3, 1000):
        logits = torch.full((2, size), -torch.inf)
        logits[:, 1 : size - 1] = torch.randn(size - 2)
        tokens, _ = sampler.choose(logits, [0.0, 1 - 2**-53])
        assert tokens[0] == 1 and tokens[1] < size - 1


def test_what_is_no_distribution_is_an_error() -> None:
    for bad in (torch.nan, torch.inf):
        with pytest.raises(RuntimeError, match="logits are NaN or infinite"):
            sampler_of(do_sample=True, top_k=0).choose(torch.tensor([[0.0, 1], [bad, 0]]), [0.5] * 2)


# ---------------------------------------------------------------------------------------------------------------------
# The experts that are reported: those of one plain pass over what a row has read
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=families.MIXTURES)
def mixture(request: pytest.FixtureRequest) -> Any:
    return families.build(families.MIXTURES[request.param])


def reporting(model: Any, **options: Any) -> SlotEngine:
    engine = slots(model, **options)
    engine.report_routes()
    return engine


def check(model: Any, turns: list[tuple[tuple[int, ...], Generation]]) -> None:
    """Each turn of a row covers all that it has read."""
    for context, turn in turns:
        assert turn.routes is not None and turn.routes.dtype == np.uint8
        with torch.no_grad(), Routers(model).replayed() as experts:
            model(input_ids=torch.tensor([[*context, *turn.token_ids]]))
        assert turn.routes.tolist() == experts()[:-1].tolist()


@pytest.mark.parametrize("most_tokens", [10_000, 130], ids=["roomy", "rows give up slots"])
def test_they_are_those_of_one_plain_pass(mixture: Any, most_tokens: int) -> None:
    """Groups share a prefill; rows of several lengths are read at once, and long ones in parts of 24 tokens."""
    plan = families.random_plan(rows=9, turns=4, group=3)
    plan.prompts[3:6] = [plan.prompts[3] * 7] * 3
    engine = reporting(mixture, cache_bytes=BYTES * most_tokens, prefill_tokens=24)
    played = families.play(engine, plan, close=False)
    for row in played:
        check(mixture, row)
    again = sum(len(row[-1][0]) + len(row[-1][1].token_ids) - 1 for row in played)
    assert (engine.prefilled_tokens > again) == (most_tokens < 10_000), "slots were not given up, or were"


def test_a_turn_that_is_given_up_or_taken_back_covers_nothing(mixture: Any) -> None:
    engine = reporting(mixture)
    engine.open(1)
    (first,) = generate_turns(engine, [[4, 5, 6]], [4])
    context = [4, 5, 6, *first.token_ids, 8, 9]
    engine.submit(TurnRequest(0, [*context, 8], 9))
    assert engine.poll() == [], "it has begun, and not ended"
    engine.release(0)
    (second,) = generate_turns(engine, [context], [5])
    other = [4, 5, 7, 8]
    (third,) = generate_turns(engine, [other], [5])
    check(mixture, [((4, 5, 6), first), (tuple(context), second), (tuple(other), third)])


def test_threads_that_share_a_model_do_not_mix_theirs_up() -> None:
    model = families.build(families.MIXTURES["mixtral"])
    played: list[Any] = [None, None]

    def play(number: int) -> None:
        played[number] = families.play(reporting(model), families.random_plan(seed=number))

    threads = [threading.Thread(target=play, args=(number,)) for number in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for row in (row for rows in played for row in rows):
        check(model, row)
