"""What the engine is told, with `SearchRollout` and in TRL's own generation; docs/options.md names these tests."""

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
@pytest.mark.parametrize("option", GENERATION_OPTIONS)
def test_generation_options(tmp_path: Path, option: str, rollout: str) -> None:
    value, policy = GENERATION_OPTIONS[option], recorded_policy()
    build = build_agent if rollout == "SearchRollout" else native_agent
    trainer = (
        build(tmp_path, model=policy, **{option: value})
        if rollout == "SearchRollout"
        else build(tmp_path, policy, **{option: value})
    )
    trainer._generate([row["prompt"] for row in questions(4)])
    assert policy.asked
    wanted = value if option == "generation_kwargs" else {option: value}
    for config in policy.asked:
        assert {name: getattr(config, name) for name in wanted} == wanted
