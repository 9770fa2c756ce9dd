"""The engines against `HFGenerator` on one policy: the same turns, ends and limits, colocated and over HTTP."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import GenerationConfig

from sorl_trl.agents.vllm import VLLMEngine, vllm_engine
from sorl_trl.rollout import Generation, HFGenerator, TurnEnd
from sorl_trl.sandbox import PROTOCOL
from tests.agents import agent_tokenizer
from tests.engines import take_turns
from tests.vllm.policies import WINDOW, each_mode, load_policy, save_policy, wrap

STOPS = PROTOCOL.stop_strings
TOKENIZER = agent_tokenizer()
(OTHER_EOS,) = TOKENIZER.encode("where", add_special_tokens=False)
EOS = [TOKENIZER.eos_token_id, OTHER_EOS]
"""The second is in no config that vLLM reads."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("engine") / "policy", sharpness=8.0)


@pytest.fixture(scope="module", params=["colocate", "server"])
def wrapper(request: Any, policy: Path) -> Iterator[Any]:
    yield from each_mode(request, policy)


@pytest.fixture
def engine(wrapper: Any) -> VLLMEngine:
    return vllm_engine(wrapper, TurnEnd(TOKENIZER, STOPS, EOS))


@pytest.fixture(scope="module")
def reference(policy: Path) -> HFGenerator:
    model = load_policy(policy).eval()
    return HFGenerator(model, TOKENIZER, STOPS, GenerationConfig(do_sample=False), EOS)


def ids(generations: Sequence[Generation]) -> list[tuple[tuple[int, ...], bool]]:
    return [(generation.token_ids, generation.stopped) for generation in generations]


def some_contexts(count: int = 48) -> tuple[list[list[int]], list[int]]:
    """Contexts and limits; some of these just fit the window."""
    draw = random.Random(0)
    contexts = [[draw.randrange(3, len(TOKENIZER)) for _ in range(draw.randint(1, WINDOW - 2))] for _ in range(count)]
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


def test_the_window_is_what_vllm_says_and_is_filled_to_its_last_token(
    engine: VLLMEngine, reference: HFGenerator, wrapper: Any
) -> None:
    assert engine.window == reference.window == WINDOW
    contexts = [[5] * (WINDOW - 1), [5] * (WINDOW - 3), [5]]
    turns = take_turns(engine, contexts, [1, 3, 20])
    assert ids(turns) == ids(reference.generate(contexts, [1, 3, 20]))
    assert len(turns[0].token_ids) == 1
    assert ids(take_turns(engine, contexts[:2], [9, 9])) == ids(turns[:2])  # cut where the window ends
    with pytest.raises(Exception, match=r"maximum (model|context) length"):
        wrapper.generate([[5] * WINDOW], None, 1)  # what vLLM itself says to it


def test_a_tag_that_is_a_special_token_ends_a_turn(tmp_path: Path, engines: list[Any]) -> None:
    """vLLM by itself leaves special tokens out of the text in which it looks for stop strings."""
    tokenizer = agent_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(stop) for stop in STOPS]})
    policy = save_policy(tmp_path / "policy", tokenizer, sharpness=8.0)
    engine = vllm_engine(wrap(policy), TurnEnd(tokenizer, STOPS, EOS))
    model = load_policy(policy).eval()
    reference = HFGenerator(model, tokenizer, STOPS, GenerationConfig(do_sample=False), EOS)
    contexts, limits = some_contexts()
    ours = take_turns(engine, contexts, limits)
    assert ids(ours) == ids(reference.generate(contexts, limits))
    closing = tokenizer.convert_tokens_to_ids("</search>")
    assert closing in tokenizer.all_special_ids and any(g.token_ids[-1] == closing for g in ours if g.stopped)
