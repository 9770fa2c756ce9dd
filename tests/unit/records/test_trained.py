"""What a dump of trained trajectories keeps, and how tokens become texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_trl.records.trained import read_trained, write_trained
from sorl_trl.rollout.trajectories import decode, token_texts
from tests.tools import qwen_tokenizer
from tests.unit.records.entries import TRAINED


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    exact = {"token_ratios": (1.0, 1.5, 0.25, 1.0, 1.0, 2.0, 1.0), "ratios": (1.25,) * 7}  # in 32 bits
    whole = replace(TRAINED, **exact, turn_rewards=(0.5, None))
    empty = replace(whole, question=None, golden_answers=(), reward=None, answer=None, stop_reason=None)
    write_trained(tmp_path, TRAINED.step, 0, [whole, empty])
    assert list(read_trained(tmp_path)) == [whole, empty]


def test_steps_come_in_order_and_then_processes(tmp_path: Path) -> None:
    for step, rank in [(100_000_000, 0), (20, 10), (20, 2), (3, 0)]:
        write_trained(tmp_path, step, rank, [replace(TRAINED, step=step, generated_at_step=rank)])
    order = [(trained.step, trained.generated_at_step) for trained in read_trained(tmp_path)]
    assert order == [(3, 0), (20, 2), (20, 10), (100_000_000, 0)]


def test_a_character_stands_at_its_last_token() -> None:
    tokenizer = qwen_tokenizer()
    assert token_texts(tokenizer, tokenizer.encode("aé€b")) == ["a", "", "é", "", "", "€", "b"]


@settings(deadline=None)
@given(st.lists(st.integers(0, 255), max_size=30))
def test_token_texts_join_to_the_text(token_ids: list[int]) -> None:
    """Bytes that are no text included."""
    tokenizer = qwen_tokenizer()
    assert "".join(token_texts(tokenizer, token_ids)) == decode(tokenizer, token_ids)
