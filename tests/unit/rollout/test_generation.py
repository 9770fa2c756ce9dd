from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

from sorl_trl.rollout import Generation, HFGenerator, LockStepEngine, TagProtocol, TurnEnd, TurnRequest
from tests.policies import build_policy

from .fakes import WORDS, bpe_tokenizer, encode, word_tokenizer

EOS = WORDS.index("<eos>")
STOPS = TagProtocol().stop_strings


def generator(model: Any) -> HFGenerator:
    return HFGenerator(model, TurnEnd(word_tokenizer(), STOPS, [EOS]), GenerationConfig(do_sample=False))


def replaying(rows: list[tuple[int, ...]]) -> LlamaForCausalLM:
    """A real model whose logits are overwritten: greedy row r samples `rows[r]`, then its last token for ever."""
    model = build_policy(vocab_size=len(WORDS)).eval()
    forward, steps = model.forward, count()

    def replay(**kwargs: Any) -> Any:
        output, step = forward(**kwargs), next(steps)
        tokens = torch.tensor([row[min(step, len(row) - 1)] for row in rows])
        output.logits = torch.nn.functional.one_hot(tokens, len(WORDS)).float()[:, None]
        return output

    model.forward = replay  # type: ignore[method-assign]
    return model


def words(text: str) -> tuple[int, ...]:
    return tuple(map(WORDS.index, text.split()))


def test_each_row_stops_at_its_own_tag_eos_or_limit() -> None:
    rows = [
        ("<search> capital </search> of of of", 9, "<search> capital </search>", True),
        ("Paris <eos> France France", 9, "Paris <eos>", True),
        ("<answer> No found Paris </answer> I", 9, "<answer> No found Paris </answer>", True),
        ("I should </answer>", 3, "I should </answer>", True),
        ("I should capital of", 2, "I should", False),
        ("I", 7, "I I I I I I I", False),
    ]
    model = replaying([words(text) for text, *_ in rows])
    contexts = [words("Doc " * (1 + i % 3)) for i in range(len(rows))]
    batch = generator(model).generate(contexts, [limit for _, limit, *_ in rows])
    assert batch == [Generation(words(kept), None, stopped) for *_, kept, stopped in rows]


def test_a_turn_also_ends_at_stops_of_its_own_and_a_released_row_has_none() -> None:
    """Over two tokens, over more tokens than other turns look back at, one of another row, the engine's own."""
    far = "of " * 40
    turns = [
        ("I capital of of Paris", ("capital of",), "I capital of", True),
        (far, ("capital of", far[:89]), far[:89], True),
        ("I capital of of Paris", ("No",), "I capital of of", False),
        ("I </search> Paris Paris", ("Paris",), "I </search>", True),
    ]
    rows = [0, 5, 2, 7]
    model = replaying([words(text) for _, (text, *_) in sorted(zip(rows, turns, strict=True))])
    engine = LockStepEngine(generator(model))
    engine.open(3)
    for row, (text, stops, *_) in zip(rows, turns, strict=True):
        engine.submit(TurnRequest(row, words("Doc"), 40 if text is far else 4, stops))
    engine.submit(TurnRequest(1, words("Doc"), 4))
    engine.release(1)
    expected = {row: Generation(words(kept), None, ended) for row, (*_, kept, ended) in zip(rows, turns, strict=True)}
    assert dict(engine.poll()) == expected and engine.idle


def test_where_a_turn_ends_is_one_rule_for_every_engine() -> None:
    end = TurnEnd(word_tokenizer(), STOPS, [EOS])
    ends = ["I <search> of </search>", "<eos>", "I <eos>"]
    goes_on = ["I <search> of", "<eos> I", "</search> " + "of " * end.tail]
    assert end.reached([words(text) for text in (*ends, *goes_on)]) == [True] * 3 + [False] * 3
    bpe = TurnEnd(bpe_tokenizer(), STOPS, [bpe_tokenizer().eos_token_id])
    overhanging = encode(bpe_tokenizer(), "<search>capital</search>\n\n")
    assert bpe.reached([overhanging, overhanging[:-1]]) == [True, False]
    with pytest.raises(ValueError, match="eos_token_ids is empty"):
        TurnEnd(word_tokenizer(), STOPS, [])
