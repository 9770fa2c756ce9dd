"""What the engine is told, with `SearchRollout` and in TRL's generation; docs/reference/options.md names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.agents import build_agent, native_agent, questions, recorded_policy

GENERATION_OPTIONS: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.01,
    "repetition_penalty": 1.3,
    "cache_implementation": "static",
    "generation_kwargs": {"typical_p": 0.9, "suppress_tokens": [2], "do_sample": False},
}
"""Option -> a value that is not its default."""


@pytest.mark.parametrize("rollout", ["SearchRollout", "native"])
def test_generation_options(tmp_path: Path, rollout: str) -> None:
    policy, wanted = recorded_policy(), dict(GENERATION_OPTIONS)
    if rollout == "SearchRollout":
        trainer = build_agent(tmp_path, model=policy, **GENERATION_OPTIONS)
    else:
        trainer = native_agent(tmp_path, policy, **GENERATION_OPTIONS)
    trainer._generate([row["prompt"] for row in questions(4)])
    wanted |= wanted.pop("generation_kwargs")
    assert policy.asked
    for config in policy.asked:
        assert {name: getattr(config, name) for name in wanted} == wanted
