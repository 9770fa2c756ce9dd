"""The engines against `HFGenerator` on one policy, colocated and over HTTP: the same turns, ends and rollouts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from examples.quickstart import PROTOCOL
from tokenizers import AddedToken
from transformers import GenerationConfig

from sorl_trl.rollout import (
    Generation,
    HFGenerator,
    TurnEnd,
    TurnRequest,
)
from sorl_trl.rollout.engines.vllm import VLLMEngine, vllm_engine
from tests.agents import VOCABULARY, agent_tokenizer
from tests.policies import play_turns, take_turns, word_tokenizer
from tests.vllm.policies import WINDOW, each_mode, load_policy, save_policy, wrap
from tests.vllm.servers import serving

STOPS = PROTOCOL.stop_strings
TOKENIZER = agent_tokenizer()
(OTHER_EOS,) = TOKENIZER.encode("where", add_special_tokens=False)
EOS = [TOKENIZER.eos_token_id, OTHER_EOS]
"""The second is in no config that vLLM reads."""
END = TurnEnd(TOKENIZER, STOPS, EOS)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("engine") / "policy", sharpness=8.0)


@pytest.fixture(scope="module", params=["colocate", "server"])
def wrapper(request: Any, policy: Path) -> Iterator[Any]:
    yield from each_mode(request, policy)


@pytest.fixture
def engine(wrapper: Any) -> VLLMEngine:
    return vllm_engine(wrapper, END)


@pytest.fixture(scope="module")
def reference(policy: Path) -> HFGenerator:
    model = load_policy(policy).eval()
    return HFGenerator(model, TurnEnd(TOKENIZER, STOPS, EOS), GenerationConfig(do_sample=False))


def ids(generations: Sequence[Generation]) -> list[tuple[tuple[int, ...], bool]]:
    return [(generation.token_ids, generation.stopped) for generation in generations]


def some_contexts(count: int = 48, longest: int = WINDOW - 2) -> tuple[list[list[int]], list[int]]:
    """Contexts and limits; some of these just fit the window."""
    draw = random.Random(0)
    contexts = [[draw.randrange(3, len(TOKENIZER)) for _ in range(draw.randint(1, longest))] for _ in range(count)]
    return contexts, [min(draw.randint(1, 16), WINDOW - len(context)) for context in contexts]


def test_greedy_turns_are_the_same(engine: VLLMEngine, reference: HFGenerator) -> None:
    contexts, limits = some_contexts()
    ours = take_turns(engine, contexts, limits)
    assert ids(ours) == ids(reference.generate(contexts, limits))
    ends = {generation.token_ids[-1] for generation in ours if generation.stopped}
    assert ends >= {*EOS, *TOKENIZER.encode("</search>", add_special_tokens=False)}
    assert any(not generation.stopped for generation in ours)
    assert any(len(c) + len(g.token_ids) == WINDOW for c, g in zip(contexts, ours, strict=True))
    assert all(g.logprobs is not None and len(g.logprobs) == len(g.token_ids) for g in ours)


def test_a_tag_that_is_a_special_token_ends_a_turn(tmp_path: Path, engines: list[Any]) -> None:
    """vLLM by itself leaves special tokens out of the text in which it looks for stop strings."""
    tokenizer = agent_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(stop) for stop in STOPS]})
    policy = save_policy(tmp_path / "policy", tokenizer, sharpness=8.0)
    engine = vllm_engine(wrap(policy), TurnEnd(tokenizer, STOPS, EOS))
    model = load_policy(policy).eval()
    reference = HFGenerator(model, TurnEnd(tokenizer, STOPS, EOS), GenerationConfig(do_sample=False))
    contexts, limits = some_contexts()
    ours = take_turns(engine, contexts, limits)
    assert ids(ours) == ids(reference.generate(contexts, limits))
    closing = tokenizer.convert_tokens_to_ids("</search>")
    assert closing in tokenizer.all_special_ids and any(g.token_ids[-1] == closing for g in ours if g.stopped)


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_a_turn_follows_its_schema(tmp_path: Path, engines: list[Any], mode: str) -> None:
    tokenizer = word_tokenizer([*VOCABULARY, "{", "}", ":", '"fits"', "true", "false"])
    policy = save_policy(tmp_path / "policy", tokenizer, sharpness=8.0)
    schema = {"type": "object", "properties": {"fits": {"type": "boolean"}}, "required": ["fits"]}
    schema |= {"additionalProperties": False}
    AcceleratorState._reset_state(reset_partial_state=True)  # it counts on the process group of an engine that ended
    with ExitStack() as stack:
        where = {}
        if mode == "server":
            served = stack.enter_context(serving(policy, WINDOW, tmp_path / "output.txt"))
            where = {"mode": "server", "server_base_url": served.url}
        engine = vllm_engine(wrap(policy, **where), TurnEnd(tokenizer, STOPS, EOS))
        contexts = [[5, word] for word in range(6, 14)]
        turns = [TurnRequest(row, each, 12, (), schema if row % 2 else None) for row, each in enumerate(contexts)]
        ours = play_turns(engine, turns)
    reference = HFGenerator(
        load_policy(policy).eval(), TurnEnd(tokenizer, STOPS, EOS), GenerationConfig(do_sample=False)
    )
    assert ids(ours[::2]) == ids(reference.generate(contexts[::2], [12] * 4))
    for turn in ours[1::2]:
        assert turn.stopped and isinstance(json.loads(tokenizer.decode(turn.token_ids[:-1]))["fits"], bool)


def sampled(engine: Any, rows: Sequence[int], seed: int = 0) -> list[Generation]:
    """A turn of each row from one context, as in a group."""
    torch.manual_seed(seed)
    return take_turns(engine, [[5, 6]] * len(rows), [12] * len(rows), rows)


def test_what_a_row_samples_depends_on_no_other_row(wrapper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapper, "temperature", 1.0)
    engine = vllm_engine(wrapper, END)
    all_rows = sampled(engine, range(16))
    assert [all_rows[row].token_ids for row in (3, 11)] == [each.token_ids for each in sampled(engine, (3, 11))]
    assert len({each.token_ids for each in all_rows}) > 8
    assert [each.token_ids for each in sampled(engine, range(16), seed=1)] != [each.token_ids for each in all_rows]
