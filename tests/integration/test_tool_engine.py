"""TRL's tool loop over an engine of ours: the same tokens, masks, messages and metrics."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from sorl_trl.trainers.agents import tool_engine
from tests.policies import build_policy
from tests.tools import build, qwen_tokenizer, tool_call

CITIES = ("Oslo", "Bern", "Lima")
WORDS = [*(tool_call("lookup", city=city) for city in CITIES), "It is there.", "I think "]
"""Each is one token of a policy that writes these, ends its message, and nothing else."""
ENGINES = ["lockstep", "slots"]
GREEDY = {"generation_kwargs": {"do_sample": False}, "max_completion_length": 900}


def lookup(city: str) -> str:
    """
    Say where a city is.

    Args:
        city: the name of the city

    Returns:
        a sentence
    """
    return f"{city} is " + "far " * len(city) if city != "Bern" else "x" * 400


class Seen:
    """A reward function that keeps the messages it is given."""

    __name__ = "seen"

    def __init__(self) -> None:
        self.completions: list[Any] = []

    def __call__(self, completions: Any, **_: Any) -> list[float]:
        self.completions = completions
        return [float(len(str(completion))) for completion in completions]


def calling_policy(tokenizer: Any, seed: int = 1) -> Any:
    """Random, but that it writes few tokens: which of them depends on all that it has read."""
    policy = build_policy(seed, vocab_size=len(tokenizer))
    chosen = [*tokenizer.convert_tokens_to_ids(WORDS), tokenizer.eos_token_id]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in policy.model.layers:
            for part, factor in {"q_proj": 50, "k_proj": 50, "v_proj": 30, "o_proj": 30}.items():
                getattr(module.self_attn, part).weight.mul_(factor)
        policy.lm_head.weight.zero_()
        policy.lm_head.weight[chosen] = torch.randn(len(chosen), 16, generator=generator)
    return policy


def prepare(folder: Path, options: dict[str, Any], tools: Any = (lookup,)) -> tuple[Any, Seen]:
    tokenizer = qwen_tokenizer()
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in WORDS])
    seen = Seen()
    trainer = build(folder, tokenizer, seen, {**GREEDY, **options}, policy=calling_policy(tokenizer), tools=[*tools])
    del trainer._generate_single_turn  # the policy's own
    return trainer, seen


def run(trainer: Any) -> tuple[dict[str, Any], dict[str, float]]:
    contents = [f"Where is it? {letter * 300}" for letter in "abcdefgh"]
    batch = trainer._generate_and_score_completions([{"prompt": [{"role": "user", "content": c}]} for c in contents])
    return batch, {name: values[-1] for name, values in trainer._metrics["train"].items()}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("max_completion_length", [900, 360])
def test_greedy_decoding_gives_what_trls_gives(tmp_path: Path, engine: str, max_completion_length: int) -> None:
    """Completions, masks, rewards, messages and metrics, with results that TRL drops."""
    runs = []
    for each in ("trl", engine):
        options = {"tool_engine": each, "max_completion_length": max_completion_length}
        trainer, seen = prepare(tmp_path, options)
        runs.append((*run(trainer), seen.completions))
    (trls, trls_metrics, trls_messages), (ours, metrics, messages) = runs
    assert messages == trls_messages
    for name, value in trls.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, ours[name]), name
    assert metrics == trls_metrics
    turns = [sum(message["role"] == "assistant" for message in completion) for completion in messages]
    assert min(turns) == 1 < max(turns)
    assert any(completion[-1].get("tool_calls") for completion in messages), "results that did not fit"


class Watched:
    """What becomes of the engine of a trainer: `policy_engine`, recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.prefilled = 0
        self._real = tool_engine.policy_engine
        monkeypatch.setattr(tool_engine, "policy_engine", self._watched)

    @contextmanager
    def _watched(self, *args: Any) -> Any:
        with self._real(*args) as (engine, any_active):
            real_open, real_close = engine.open, engine.close

            def opened(rows: int) -> None:
                self.log.append(f"open {rows}")
                real_open(rows)

            def closed() -> None:
                self.log.append("close")
                self.prefilled += engine.work.prefilled_tokens
                real_close()

            engine.open, engine.close = opened, closed
            yield engine, any_active
        self.log.append("leave")


def test_a_rollout_opens_one_engine_which_reads_each_token_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    trainer, seen = prepare(tmp_path, {"tool_engine": "slots"})
    batch, _ = run(trainer)
    assert watched.log == ["open 8", "close", "leave"]
    of_environment = int(batch["prompt_mask"].sum() + (batch["completion_mask"] * (1 - batch["tool_mask"])).sum())
    turns = sum(message["role"] == "assistant" for completion in seen.completions for message in completion)
    assert 0 < watched.prefilled <= of_environment + turns, "the token that ended a turn is read with what follows"
    run(trainer)
    assert watched.log == ["open 8", "close", "leave"] * 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_the_engine_is_closed_when_a_tool_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    def interrupt(city: str) -> str:
        raise error("enough")

    interrupt.__name__, interrupt.__doc__ = "lookup", lookup.__doc__
    watched = Watched(monkeypatch)
    trainer, _ = prepare(tmp_path, {"tool_engine": "lockstep"}, [interrupt])
    with pytest.raises(error, match="enough"):
        run(trainer)
    assert watched.log == ["open 8", "close", "leave"]


def test_a_tool_has_its_gradients(tmp_path: Path) -> None:
    """Generation has none; TRL calls tools outside of it."""
    recorded = []

    def differentiate(city: str) -> str:
        recorded.append(torch.is_grad_enabled())
        return city

    differentiate.__name__, differentiate.__doc__ = "lookup", lookup.__doc__
    trainer, _ = prepare(tmp_path, {"tool_engine": "lockstep"}, [differentiate])
    run(trainer)
    assert recorded and all(recorded)
