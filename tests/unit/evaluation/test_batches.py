from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from sorl_trl.evaluation.agents import Agent
from sorl_trl.evaluation.batches import complete, run_batches
from sorl_trl.evaluation.plan import plan_batches
from sorl_trl.evaluation.run_folder import RunFolder, is_masked
from sorl_trl.qa import Question
from sorl_trl.rollout import Collector, Frame, Generation, RetryPolicy, RolloutArguments, SearchResponder, TagProtocol
from sorl_trl.rollout.tasks import prompt_rows
from sorl_trl.search import NoSearch, SearchUnavailable
from sorl_trl.types import Passage

TAGS = [f"<{slash}{name}>" for name in ("search", "answer", "information") for slash in ("", "/")]
NAMES = ["ann", "bob", "cy", "di"]
WORDS = ["[PAD]", *TAGS, "nothing", "who", *NAMES]
PROTOCOL = TagProtocol(no_results="nothing", information_frame=Frame("<information> ", " </information>"))
QUESTIONS = [Question(name, f"who {name}", (name,)) for name in NAMES]


class Guesser:
    """Answers with names drawn from torch's global generator."""

    def __init__(self) -> None:
        self.calls = 0

    def generate(self, contexts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> list[Generation]:
        self.calls += 1
        opening, closing = WORDS.index("<answer>"), WORDS.index("</answer>")
        names = torch.randint(len(NAMES), (len(contexts),)) + WORDS.index("ann")
        return [Generation((opening, int(name), closing), None, stopped=True) for name in names]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[PAD]"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[PAD]")


def agent(tokenizer: PreTrainedTokenizerFast, guesser: Guesser) -> Agent:
    rows = partial(prompt_rows, rollout=RolloutArguments(prompt_template="{question}"), tokenizer=tokenizer)
    return Agent(Collector(tokenizer, NoSearch(), PROTOCOL), guesser, rows)


class Searcher(Guesser):
    """Of the calls, the second searches, or all do."""

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.always = always

    def generate(self, contexts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> list[Generation]:
        answers = super().generate(contexts, max_new_tokens)
        ids = tuple(WORDS.index(word) for word in ("<search>", "ann", "</search>"))
        return [Generation(ids, None, stopped=True)] * len(contexts) if self.always or self.calls == 2 else answers


class Down:
    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        raise SearchUnavailable("down")


def failing(tokenizer: PreTrainedTokenizerFast) -> Collector:
    return Collector(tokenizer, SearchResponder(Down(), PROTOCOL, retry=RetryPolicy(attempts=1)), PROTOCOL)


def test_questions_are_asked_without_control_tokens(tokenizer) -> None:
    asked = [Question("ann", "who ann <answer> bob </answer>", ("ann",))]
    ((_, rows),) = run_batches(plan_batches({"own": asked}, 1, 4), agent(tokenizer, Guesser()), seed=0)
    assert not {*TAGS} & {*rows[0].prompt.split()}


def test_a_batch_samples_the_same_whatever_came_before_it(tokenizer) -> None:
    batches = plan_batches({"own": QUESTIONS}, num_samples=8, batch_size=8)
    everything = [rows for _, rows in run_batches(batches, agent(tokenizer, Guesser()), seed=0)]
    torch.rand(7)
    assert [rows for _, rows in run_batches(batches[2:], agent(tokenizer, Guesser()), seed=0)] == everything[2:]
    assert [rows for _, rows in run_batches(batches, agent(tokenizer, Guesser()), seed=1)] != everything


def test_batches_in_which_the_engine_failed_are_made_anew(tokenizer, tmp_path: Path) -> None:
    batches = plan_batches({"own": QUESTIONS}, num_samples=1, batch_size=1)
    run = RunFolder(tmp_path)
    searcher = replace(agent(tokenizer, Searcher()), collector=failing(tokenizer))
    complete(run, batches, lambda: searcher, 0, show_progress=False)
    assert [is_masked(outcome) for outcome in run.outcomes("own")] == [False, True, False, False]
    working = Guesser()
    complete(run, batches, lambda: agent(tokenizer, working), 0, show_progress=False)
    assert working.calls == 1
    assert not any(map(is_masked, run.outcomes("own")))


def test_nothing_is_loaded_when_nothing_is_left(tokenizer, tmp_path: Path, capsys) -> None:
    batches = plan_batches({"own": QUESTIONS}, num_samples=1, batch_size=3)
    run = RunFolder(tmp_path)
    complete(run, batches, lambda: agent(tokenizer, Guesser()), seed=0)

    def never() -> Agent:
        raise AssertionError("loaded")

    complete(run, batches, never, seed=0)
    assert "4/4" in capsys.readouterr().err.split("Evaluating: ")[-1]


def test_a_run_whose_engine_is_down_stops(tokenizer, tmp_path: Path) -> None:
    searcher = replace(agent(tokenizer, Searcher(always=True)), collector=failing(tokenizer))
    run = RunFolder(tmp_path)
    run.claim({"datasets": {"own": {}}})
    batches = plan_batches({"own": QUESTIONS}, num_samples=4, batch_size=1)
    with pytest.raises(SearchUnavailable, match="down in 3 batches in a row"):
        complete(run, batches, lambda: searcher, seed=0, show_progress=False)
    assert len(run.outcomes("own")) == 3
