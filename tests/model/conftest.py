"""A real language model, SmolLM2-135M-Instruct, with its BPE tokenizer and its ChatML template: `make test-model`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.model)


@pytest.fixture(scope="session")
def folder() -> str:
    """Of the model. Where it is absent the tests fail: they run where they are asked for alone."""
    found = Path(os.environ.get("SORL_TEST_MODEL", Path(__file__).parents[2] / "models/smollm2-135m"))
    if not (found / "config.json").is_file():
        pytest.fail(f"{found} holds no model: run `make model`", pytrace=False)
    return str(found)


@pytest.fixture
def tokenizer(folder: str) -> Any:
    """Anew for each test: trainers change padding, and some tests the template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def shared_tokenizer(folder: str) -> Any:
    """For properties, which look at many examples; nobody changes it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def model(folder: str) -> Any:
    """The policy, which nobody trains."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()
