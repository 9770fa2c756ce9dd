"""Tokenizers, a scripted policy and a search engine that fails on demand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sorl_trl.rollout import Engine, Generation, TurnRequest
from sorl_trl.types import Passage, Trajectory, Turn
from tests import policies

TAGS = [f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/")]
WORDS = ["<pad>", "<eos>", "<unk>", *TAGS, "Doc", "Paris", "France", "capital", "of", "No", "found", "I", "should"]
PARIS = Passage("7", "Paris", "capital of France", 1.0)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word; the tags are words, and nothing declares them special."""
    return policies.word_tokenizer(WORDS)


@cache
def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, trained so that `>\\n\\n` is one token; chat markers are special, `<|fim_prefix|>` is not."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r">\n\n|\w+|\s+|[^\w\s]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    bpe.train_from_iterator(["<search>capital</search>\n\n<answer>Paris</answer>\n\n"] * 50, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.add_tokens(["<|fim_prefix|>"])
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


class ScriptedGenerator:
    """Gives row r, recognized by its prompt's first token, the turns of `scripts[r]` in order, cut to the budget."""

    def __init__(self, scripts: dict[int, list[Generation]], window: int | None = None) -> None:
        self.scripts = scripts
        self.window = window
        self.calls: list[list[tuple[int, ...]]] = []
        self.budgets: list[list[int]] = []
        self.sampled: dict[int, list[tuple[int, ...]]] = {row: [] for row in scripts}

    def generate(self, contexts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> list[Generation]:
        self.calls.append([tuple(context) for context in contexts])
        self.budgets.append(list(max_new_tokens))
        return [self._next(context[0], limit) for context, limit in zip(contexts, max_new_tokens, strict=True)]

    def _next(self, row: int, limit: int) -> Generation:
        if row not in self.scripts:
            return Generation((0,), None, False)  # a dummy row
        turn = self.scripts[row][len(self.sampled[row])]
        ids = turn.token_ids[:limit]
        self.sampled[row].append(ids)
        logprobs = None if turn.logprobs is None else turn.logprobs[:limit]
        return Generation(ids, logprobs, turn.stopped and len(ids) == len(turn.token_ids))


def turn_of(text: str, logprob: float | None = None) -> Generation:
    """What a policy with the word tokenizer would sample for `text`."""
    ids = encode(word_tokenizer(), text)
    return Generation(ids, None if logprob is None else (logprob,) * len(ids), True)


class FakeSearch:
    """Finds Paris for every query. Raises the exceptions of `failures` first, one per call."""

    def __init__(self, failures: Sequence[Exception] = ()) -> None:
        self.failures = list(failures)
        self.calls: list[list[str]] = []

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        self.calls.append(list(queries))
        if self.failures:
            raise self.failures.pop(0)
        return [[PARIS][:k] for _ in queries]


class SteppingEngine(Engine):
    """Samples a token per row and poll; what it samples depends on the row's context alone.

    Log-probabilities depend on all rows of the step, as in reduced precision they do by rounding.
    """

    def __init__(self, turns: Sequence[str]) -> None:
        self.turns = [encode(word_tokenizer(), text) for text in turns]
        self.rows: dict[int, tuple[tuple[int, ...], int, list[float]]] = {}
        self.released: list[int] = []
        self.is_open = False

    def open(self, rows: int) -> None:
        self.rows, self.released, self.is_open = {}, [], True

    def submit(self, request: TurnRequest) -> None:
        assert request.row not in self.rows and request.row not in self.released
        draw = random.Random(repr((request.row, *request.token_ids)))
        self.rows[request.row] = (draw.choice(self.turns), request.limit, [])

    def poll(self) -> list[tuple[int, Generation]]:
        step = random.Random(
            repr([(row, len(logprobs)) for row, (*_, logprobs) in sorted(self.rows.items())])
        ).random()
        ended = []
        for row, (ids, limit, logprobs) in list(self.rows.items()):
            logprobs.append(-step)
            if len(logprobs) == min(limit, len(ids)):
                del self.rows[row]
                stopped = len(ids) <= limit
                ended.append((row, Generation(ids[: len(logprobs)], tuple(logprobs), stopped)))
        return ended[::-1]

    def release(self, row: int) -> None:
        self.released.append(row)

    @property
    def idle(self) -> bool:
        return not self.rows

    def close(self) -> None:
        self.is_open = False


def check_rows(trajectories: Sequence[Trajectory]) -> None:
    """Token by token, each is shown exactly: the tokens in order, and which turn each of them is of."""
    for trajectory in trajectories:
        trained = not trajectory.stop_reason.is_infrastructure_failure
        turns = iter(range(len(trajectory.turns)))
        number = [next(turns) if isinstance(each, Turn) and trained else -1 for each in trajectory.segments]
        assert trajectory.completion_ids == [token for each in trajectory.segments for token in each.token_ids]
        numbered = zip(number, trajectory.segments, strict=True)
        assert trajectory.turn_ids == [turn for turn, each in numbered for _ in each.token_ids]
        assert trajectory.env_mask == [int(turn >= 0) for turn in trajectory.turn_ids]
        assert all(turn.token_ids for turn in trajectory.turns)
