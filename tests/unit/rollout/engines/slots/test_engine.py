"""What the slot engine computes, keeps, shares and gives back."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from sorl_trl.rollout import Generation, HFGenerator, LockStepEngine, generate_turns
from sorl_trl.rollout.engines.slots import SlotEngine
from sorl_trl.rollout.engines.slots import engine as engine_module
from tests import model_families as families

GREEDY = GenerationConfig(do_sample=False)
SAMPLED = GenerationConfig(do_sample=True, temperature=1.0, top_k=0)
BYTES = 2 * 2 * 2 * 8 * 4  # of a token: layers, keys and values, heads, head size, bytes
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


def test_what_lies_behind_the_mask_changes_nothing(llama: Any) -> None:
    """A token whose embedding is NaN spoils its own row; that row's slot is used by others, before and after it."""
    plan = families.random_plan(rows=9, seed=2, group=3)
    expected = families.play(slots(llama), plan)
    seen = {token for row in expected for context, turn in row for token in (*context, *turn.token_ids)}
    bad = min(set(range(families.VOCABULARY)) - seen)
    with torch.no_grad():
        llama.model.embed_tokens.weight[bad] = torch.nan
    cap = BYTES * 4 * 45  # four rows at once: slots are taken over
    for spoilt in (0, 4, 8):
        plan.prompts[spoilt] = [bad, *plan.prompts[spoilt], bad]
        played = families.play(slots(llama, cache_bytes=cap), plan)
        plan.prompts[spoilt] = plan.prompts[spoilt][1:-1]
        assert [row for i, row in enumerate(played) if i != spoilt] == [
            row for i, row in enumerate(expected) if i != spoilt
        ]


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
    engine.open(1)
    for row, own in enumerate(stops):
        engine.submit(row, PROMPT, 30, own)
    ended: dict[int, Generation] = {}
    while not engine.idle:
        ended |= dict(engine.poll())
    return [ended[row] for row in range(len(stops))]


def test_each_row_of_a_poll_ends_at_its_own_stops(llama: Any) -> None:
    end = families.turn_end()
    (whole,) = turns_with(slots(llama), [()])
    early, later = (end.tokenizer.decode(whole.token_ids[i : i + 2]) for i in (1, 2))
    turns = turns_with(slots(llama), [(early,), (later, "unheard of"), ()])
    assert [len(turn.token_ids) for turn in turns] == [3, 4, 5]
    reference = LockStepEngine(HFGenerator(llama, end.tokenizer, end.stop_strings, GREEDY, end.eos_token_ids))
    assert turns == turns_with(reference, [(early,), (later, "unheard of"), ()])


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
        engine.submit(5, PROMPT, 30)
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
            engine.submit(row, PROMPT[row:], 30)
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
