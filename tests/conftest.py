"""Shared by all tests: no hub, one thread, and a tokenizer whose tokens are words.

Nothing heavy is imported here: with xdist, the process that only hands out tests reads this file too.
"""

from __future__ import annotations

import contextlib
import gc
import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

with contextlib.suppress(ModuleNotFoundError):  # which the environment of tests/vllm/ lacks
    from hypothesis import settings

    # No test measures time, hypothesis's deadlines included: a loaded machine is not a defect.
    settings.register_profile("whole", deadline=None)
    settings.register_profile("fast", deadline=None, max_examples=10)
    settings.load_profile("whole")


def pytest_collection_finish() -> None:
    """Everything is imported: the garbage collections that each trainer asks for need not go through it again.

    They took a third of the time of a test that trains.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Word level, 32 entries: pad 0, eos 1, unk 2, `</think>` 3, words w0…w27 from 4 on."""
    from tests.policies import WORDS, word_tokenizer

    return word_tokenizer(WORDS)


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of a run of the tests have in common."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
