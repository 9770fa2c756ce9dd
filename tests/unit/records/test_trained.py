"""What a dump of trained trajectories keeps, and how tokens become texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sorl_trl.records.trained import TrainedTrajectory, read_trained, write_trained
from sorl_trl.rollout.trajectories import decode, token_texts

TRAINED = TrainedTrajectory(
    step=3,
    generated_at_step=1,
    prompt="Who?",
    question="Who?",
    golden_answers=("Ada", "Lovelace"),
    reward=0.5,
    answer="Ada",
    stop_reason="answered",
    tokens=("A", "", "da"),
    turn_ids=(0, 0, -1),
    token_ratios=(1.0, 1.5, 0.25),
    ratios=(1.25, 1.25, 1.0),
    advantages=(2.0, -2.0, 0.0),
    clipped=("clipped", "outside", "none"),
    actions=("calculate", "answer"),
    turn_rewards=(0.5, None),
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token: characters beyond ASCII are several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    empty = replace(TRAINED, question=None, golden_answers=(), reward=None, answer=None, stop_reason=None)
    write_trained(tmp_path, 3, 0, [TRAINED, empty])
    assert list(read_trained(tmp_path)) == [TRAINED, empty]


def test_steps_come_in_order_and_then_processes(tmp_path: Path) -> None:
    for step, rank in [(100_000_000, 0), (20, 10), (20, 2), (3, 0)]:
        write_trained(tmp_path, step, rank, [replace(TRAINED, step=step, generated_at_step=rank)])
    order = [(trained.step, trained.generated_at_step) for trained in read_trained(tmp_path)]
    assert order == [(3, 0), (20, 2), (20, 10), (100_000_000, 0)]


def test_a_character_stands_at_its_last_token() -> None:
    tokenizer = byte_tokenizer()
    assert token_texts(tokenizer, tokenizer.encode("aé€b")) == ["a", "", "é", "", "", "€", "b"]


@settings(deadline=None)
@given(st.lists(st.integers(0, 255), max_size=30))
def test_token_texts_join_to_the_text(token_ids: list[int]) -> None:
    """Bytes that are no text included."""
    tokenizer = byte_tokenizer()
    assert "".join(token_texts(tokenizer, token_ids)) == decode(tokenizer, token_ids)
