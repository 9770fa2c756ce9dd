"""Which token comes next: the distributions of transformers, at given random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList

from sorl_trl.rollout.engines.slots.engine import Sampler
from sorl_trl.rollout.engines.slots.support import resolved
from tests import model_families as families


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
    tokens, _ = Sampler(config).choose(logits.expand(len(points), -1), points)
    shares = torch.bincount(torch.tensor(tokens), minlength=12) / len(points)
    torch.testing.assert_close(shares, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 3, "top_p": 0.6, "min_p": 0.2}, {"temperature": 2.0}, {"do_sample": False}]
)
def test_log_probabilities_are_among_all_tokens_at_the_temperature_that_is_asked_for(options: dict[str, Any]) -> None:
    """A trainer compares them with its own, which know no top-k."""
    logits, points = torch.randn(6, 12) * 2, [0.05, 0.2, 0.4, 0.6, 0.8, 0.99]
    sampler = Sampler(GenerationConfig(**{"do_sample": True, "top_k": 0, **options}))
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
    sampler = Sampler(GenerationConfig(do_sample=True, top_k=0))
    for size in (3, 1000):
        logits = torch.full((2, size), -torch.inf)
        logits[:, 1 : size - 1] = torch.randn(size - 2)
        tokens, _ = sampler.choose(logits, [0.0, 1 - 2**-53])
        assert tokens[0] == 1 and tokens[1] < size - 1


def test_what_is_no_distribution_is_an_error() -> None:
    for bad in (torch.nan, torch.inf):
        with pytest.raises(RuntimeError, match="logits are NaN or infinite"):
            Sampler(GenerationConfig(do_sample=True, top_k=0)).choose(torch.tensor([[0.0, 1], [bad, 0]]), [0.5] * 2)
