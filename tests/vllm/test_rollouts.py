"""Rollouts of real engines: what rows sample, and what a failure in the middle of one leaves behind: nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from sorl_trl.agents.vllm import vllm_engine
from sorl_trl.rollout import (
    Collector,
    Generation,
    HFGenerator,
    LockStepEngine,
    Reply,
    Responder,
    RolloutLimits,
    RowTurn,
    TurnEnd,
)
from sorl_trl.sandbox import PROTOCOL
from tests.agents import agent_tokenizer
from tests.engines import take_turns
from tests.vllm.policies import each_mode, load_policy, save_policy

TOKENIZER = agent_tokenizer()
END = TurnEnd(TOKENIZER, PROTOCOL.stop_strings, [TOKENIZER.eos_token_id])
LIMITS = RolloutLimits(max_turns=4, max_turn_tokens=8, max_observation_tokens=6, max_trajectory_tokens=40)
DRAW = random.Random(0)
PROMPTS = [[DRAW.randrange(3, len(TOKENIZER)) for _ in range(DRAW.randint(2, 24))] for _ in range(32)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("rollouts") / "policy", sharpness=8.0)


@pytest.fixture(scope="module", params=["colocate", "server"])
def shared(request: Any, policy: Path) -> Iterator[Any]:
    yield from each_mode(request, policy)


@pytest.fixture
def wrapper(shared: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """TRL's wrapper, sampling; what a test changes in it is put back."""
    monkeypatch.setattr(shared, "temperature", 1.0)
    return shared


def sampled(engine: Any, rows: Sequence[int], seed: int = 0) -> list[Generation]:
    """A turn of each row from one context, as in a group."""
    torch.manual_seed(seed)
    return take_turns(engine, [[5, 6]] * len(rows), [12] * len(rows), rows)


def test_what_a_row_samples_depends_on_no_other_row(wrapper: Any) -> None:
    engine = vllm_engine(wrapper, END)
    all_rows = sampled(engine, range(16))
    assert [all_rows[row].token_ids for row in (3, 11)] == [each.token_ids for each in sampled(engine, (3, 11))]
    assert len({each.token_ids for each in all_rows}) > 8
    assert [each.token_ids for each in sampled(engine, range(16), seed=1)] != [each.token_ids for each in all_rows]


class World(Responder):
    """Finds the same for every query; the first time that it is asked, something happens."""

    def __init__(self, first: Callable[[], None] = lambda: None) -> None:
        self.first, self.asked = first, 0

    def ask(self, turns: Sequence[RowTurn]) -> list[Future[Reply]]:
        self.asked += 1
        if turns and self.asked == 1:
            self.first()
        replies: list[Future[Reply]] = [Future() for _ in turns]
        for each in replies:
            each.set_result(Reply("rome lima"))
        return replies


def collect(engine: Any, world: World) -> list[tuple[int, ...]]:
    """What greedy trajectories consist of."""
    trajectories = Collector(TOKENIZER, world, PROTOCOL, LIMITS).collect(PROMPTS, engine)
    assert world.asked > 1
    return [tuple(token for segment in t.segments for token in segment.token_ids) for t in trajectories]


@pytest.fixture(scope="module")
def expected(policy: Path) -> list[tuple[int, ...]]:
    model = load_policy(policy).eval()
    sampling = GenerationConfig(do_sample=False)
    reference = HFGenerator(model, TOKENIZER, END.stop_strings, sampling, END.eos_token_ids)
    return collect(LockStepEngine(reference), World())


def test_nothing_is_left_after_a_failure(wrapper: Any, expected: list[tuple[int, ...]]) -> None:
    wrapper.temperature = 0.0
    engine = vllm_engine(wrapper, END)

    def fail() -> None:
        assert not engine.idle
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        collect(engine, World(fail))
    assert_empty(wrapper)
    assert collect(engine, World()) == expected


def assert_empty(wrapper: Any) -> None:
    if wrapper.mode == "colocate":
        assert not wrapper.llm.llm_engine.has_unfinished_requests()
        assert wrapper.llm.reset_prefix_cache(), "refused while a request holds some of it"
