"""A rollout that is the same for every engine: how long each turn is, what it reads after it, and how long that takes.

Rows come in groups of eight that share a prompt of 60 to 140 tokens. A row takes three or four turns (even odds) and
reads 150 to 400 tokens after each but the last (uniform). The grid's cell sets the length of turns: log-normal,
the shortest and the longest two sigma from the median, and what lies beyond cut to them, so that "10-150" has a median
of 39 tokens. What a turn searches for takes a time of its own: log-normal with the cell's mean and a sigma
of 0.75, so that one search in a hundred takes 4.3 times the mean. An engine that is asked for several at once answers
them side by side, and is as slow as the slowest. All is drawn from a fixed seed: the same for all engines.

The model has random weights. It samples what it likes, but never a token that ends a turn: turns end where the script
says so, and their last token is then replaced by one that reads as a search or an answer. No engine has computed
anything for that token yet, so that nothing it keeps becomes wrong.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks import common
from sorl_trl.rollout import EngineOptions, Frame, RolloutLimits, TagProtocol
from sorl_trl.types import Passage

SEED = 0
GROUP = 8
TURNS = (3, 4)
PROMPT = (60, 140)
OBSERVATION = (150, 400)
"""Tokens, with the frame."""
SIGMA = 0.75
WORDS = 2048
PAD, EOS, UNKNOWN = "<|pad|>", "<|im_end|>", "<|unknown|>"
TAGS = tuple(f"<{slash}{name}>" for name in ("search", "information", "answer") for slash in ("", "/"))
ANSWER = "<answer>yes</answer>"
REPLY = "<|im_start|>assistant\n"
"""What every prompt and every observation ends with: TRL reads a reply from there on."""
PROTOCOL = TagProtocol(passage_template="{text}", information_frame=Frame("<information>", REPLY))

SMALL = (64, 2)
"""Hidden size and layers of a model that is small enough for two cores."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Cell:
    """One workload of the grid, and the model that it is run with."""

    rows: int
    turn_tokens: tuple[int, int]
    """The shortest and the longest turn."""
    search_ms: float
    hidden_size: int = SMALL[0]
    layers: int = SMALL[1]
    rejoin_after: int = EngineOptions().rejoin_after


class Script:
    """What happens in the rollout of a cell."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        draw = np.random.default_rng([SEED, cell.rows, *cell.turn_tokens])
        self.tokenizer = build_tokenizer(cell.rows)
        begin, reply = self.tokenizer.convert_tokens_to_ids(["<information>", REPLY])
        prompts = [[*self._words(draw, PROMPT)[1:], reply] for _ in range(-(-cell.rows // GROUP))]
        self.prompts = [prompts[row // GROUP] for row in range(cell.rows)]
        counts = draw.integers(TURNS[0], TURNS[1] + 1, cell.rows)
        self.turns = [_lengths(draw, cell.turn_tokens, count) for count in counts]
        """Tokens of each turn, by row."""
        self.observations = [
            [[begin, *self._words(draw, OBSERVATION)[2:], reply] for _ in turns[1:]] for turns in self.turns
        ]
        """What is read after each turn but the last, by row."""
        normal = np.random.default_rng([SEED, cell.rows]).standard_normal((cell.rows, TURNS[1] - 1))
        self.seconds = cell.search_ms / 1000 * np.exp(SIGMA * normal - SIGMA**2 / 2)
        """How long each search takes."""

    @staticmethod
    def _words(draw: np.random.Generator, sizes: tuple[int, int]) -> list[int]:
        return [int(word) for word in draw.integers(0, WORDS, draw.integers(sizes[0], sizes[1] + 1))]

    @property
    def needed_tokens(self) -> int:
        """What must go through the model as context, if each token of a trajectory is computed once.

        The prompt, every observation, and the last token of every turn that one follows: it was sampled, but nothing
        has been computed for it. A group whose prompt is computed once needs less.
        """
        read = sum(1 + len(observation) for row in self.observations for observation in row)
        return read + sum(map(len, self.prompts))

    @property
    def limits(self) -> RolloutLimits:
        """Such that nothing in the script meets them."""
        longest = max(map(max, self.turns))
        return RolloutLimits(
            max_turns=TURNS[1] - 1,
            max_turn_tokens=longest,
            max_observation_tokens=OBSERVATION[1],
            max_trajectory_tokens=TURNS[1] * (longest + OBSERVATION[1]),
            top_k=1,
        )

    def last_token(self, row: int, turn: int) -> int:
        """The token that a turn ends with: a search, or the answer in the last turn."""
        token = ANSWER if turn == len(self.turns[row]) - 1 else f"<search>{query(row, turn)}</search>"
        return int(self.tokenizer.convert_tokens_to_ids(token))


def _lengths(draw: np.random.Generator, between: tuple[int, int], count: int) -> list[int]:
    low, high = np.log(between)
    lengths = np.exp((low + high) / 2 + (high - low) / 4 * draw.standard_normal(count))
    return [int(length) for length in np.clip(np.round(lengths), *between)]


class ScriptedSearch:
    """Answers with the observations of the script, in its time, and remembers when it did."""

    thread_safe = True

    def __init__(self, script: Script) -> None:
        self._script = script
        self.intervals: list[Interval] = []

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        return [[Passage(query, "", self._body(query))] for query in self.wait_for(queries)]

    def wait_for(self, queries: Sequence[str]) -> Sequence[str]:
        """Take the time of the slowest; return them."""
        began = time.perf_counter()
        time.sleep(max(float(self._script.seconds[row_and_turn(query)]) for query in queries))
        self.intervals.append((began, time.perf_counter()))
        return queries

    def _body(self, query: str) -> str:
        row, turn = row_and_turn(query)
        return str(self._script.tokenizer.decode(self._script.observations[row][turn][1:-1]))


def query(row: int, turn: int) -> str:
    return f"r{row}t{turn}"


def row_and_turn(text: str) -> tuple[int, int]:
    row, turn = text.removeprefix("r").split("t")
    return int(row), int(turn)


def tool_call(text: str) -> str:
    """The same search, written as TRL reads it."""
    return f'<tool_call>\n{{"name": "search", "arguments": {{"query": "{text}"}}}}\n</tool_call>'


def build_tokenizer(rows: int) -> PreTrainedTokenizerFast:
    """Words, and behind them what ends a turn: one token for each search of each row."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(WORDS)} | {UNKNOWN: WORDS}, unk_token=UNKNOWN))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )
    queries = [query(row, turn) for row in range(rows) for turn in range(TURNS[1] - 1)]
    searches = [form for text in queries for form in (f"<search>{text}</search>", tool_call(text))]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in (*TAGS, REPLY, ANSWER, *searches)])
    return tokenizer


def build_model(
    cell: Cell, tokenizer: PreTrainedTokenizerFast, kind: type[LlamaForCausalLM] = LlamaForCausalLM
) -> LlamaForCausalLM:
    """A Llama with random weights that samples words alone.

    The first number of its hidden states is the same everywhere, and the head takes it from all that is not a word.
    """
    heads = {"num_attention_heads": cell.hidden_size // 32, "num_key_value_heads": cell.hidden_size // 64}
    tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    model = common.build_model(
        *(cell.hidden_size, cell.layers, len(tokenizer), kind), max_position_embeddings=8192, **heads, **tokens
    )
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        model.lm_head.weight[:WORDS, 0] = 0
        model.lm_head.weight[WORDS:, 0] = -1e4
    return model.eval()
