"""The experts that the slot engine reports: those of one plain pass over what a row has read."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from sorl_trl.rollout import Generation, generate_turns
from sorl_trl.rollout.engines.slots import SlotEngine
from sorl_trl.rollout.routing import Routers
from tests import model_families as families

GREEDY = GenerationConfig(do_sample=False)
BYTES = 2 * 2 * 2 * 8 * 8  # of a token of a Mixtral: layers, keys and values, heads, head size, bytes


@pytest.fixture(params=families.MIXTURES)
def model(request: pytest.FixtureRequest) -> Any:
    return families.build(families.MIXTURES[request.param])


def slots(model: Any, **options: Any) -> SlotEngine:
    engine = SlotEngine(model, families.turn_end(), GREEDY, **options)
    engine.report_routes()
    return engine


def plain(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    """The experts of one pass."""
    routers = Routers(model)
    with torch.no_grad(), routers.replayed() as experts:
        model(input_ids=torch.tensor([ids]))
        return experts().numpy()


def check(model: Any, turns: list[tuple[tuple[int, ...], Generation]]) -> None:
    """Each turn of a row covers all that it has read."""
    for context, turn in turns:
        assert turn.routes is not None and turn.routes.dtype == np.uint8
        assert turn.routes.tolist() == plain(model, [*context, *turn.token_ids])[:-1].tolist()


@pytest.mark.parametrize("most_tokens", [10_000, 130], ids=["roomy", "rows give up slots"])
def test_they_are_those_of_one_plain_pass(model: Any, most_tokens: int) -> None:
    """Groups share a prefill; rows of several lengths are read at once, and long ones in parts of 24 tokens."""
    plan = families.random_plan(rows=9, turns=4, group=3)
    plan.prompts[3:6] = [plan.prompts[3] * 7] * 3
    engine = slots(model, cache_bytes=BYTES * most_tokens, prefill_tokens=24)
    played = families.play(engine, plan, close=False)
    for row in played:
        check(model, row)
    again = sum(len(row[-1][0]) + len(row[-1][1].token_ids) - 1 for row in played)
    assert (engine.prefilled_tokens > again) == (most_tokens < 10_000), "slots were not given up, or were"


def test_a_turn_that_is_given_up_covers_nothing(model: Any) -> None:
    engine = slots(model)
    engine.open(1)
    (first,) = generate_turns(engine, [[4, 5, 6]], [4])
    context = [4, 5, 6, *first.token_ids, 8, 9]
    engine.submit(0, [*context, 8], 9)
    assert engine.poll() == [], "it has begun, and not ended"
    engine.release(0)
    (second,) = generate_turns(engine, [context], [5])
    check(model, [((4, 5, 6), first), (tuple(context), second)])


def test_after_a_turn_that_is_taken_back_come_those_of_what_is_read_instead(model: Any) -> None:
    engine = slots(model)
    engine.open(1)
    generate_turns(engine, [[4, 5, 6]], [4])
    context = [4, 5, 7, 8]
    (turn,) = generate_turns(engine, [context], [5])
    check(model, [(tuple(context), turn)])


def test_threads_that_share_a_model_do_not_mix_theirs_up() -> None:
    model = families.build(families.MIXTURES["mixtral"])
    played: list[Any] = [None, None]

    def play(number: int) -> None:
        played[number] = families.play(slots(model), families.random_plan(seed=number))

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
