from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from sorl_trl.evaluation import EvaluationResult, NoSearch, encode_prompts, evaluate
from sorl_trl.qa import Question
from sorl_trl.rollout import Collector, Frame, Generation, TagProtocol
from sorl_trl.types import StopReason

from .trajectories import Parrot, answered, ended, question

TAGS = [f"<{slash}{name}>" for name in ("search", "answer", "information") for slash in ("", "/")]
WORDS = ["[PAD]", *TAGS, "nothing", "who", "ann", "bob", "cy", "user", ":"]
PROTOCOL = TagProtocol(no_results="nothing", information_frame=Frame("<information> ", " </information>"))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[PAD]"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[PAD]")


@pytest.fixture(scope="module")
def result() -> EvaluationResult:
    rows = [
        (question("Ann", 1), answered("ann", searches=1)),
        (question("Ann Lee", 2), answered("Ann", searches=3)),
        (question("Bob", 2), answered("Bob")),
        (question("Cy", 2), ended(StopReason.MAX_TURNS)),
        (question("Cy", 3), ended(StopReason.SEARCH_UNAVAILABLE)),
    ]
    questions, trajectories = zip(*rows, strict=True)
    return EvaluationResult(questions, trajectories)


def test_scores_are_means_over_all_questions_or_those_of_so_many_hops(result: EvaluationResult):
    assert result.exact_match() == 2 / 4
    assert result.exact_match(1) == 1
    assert result.exact_match(2) == pytest.approx(1 / 3)
    # "Ann" for "Ann Lee": precision 1, recall 1/2.
    assert result.f1() == pytest.approx((1 + 2 / 3 + 1 + 0) / 4)
    assert result.f1(2) == pytest.approx((2 / 3 + 1 + 0) / 3)


def test_an_infrastructure_failure_enters_its_own_share_alone(result: EvaluationResult):
    assert len(result.scored) == 4
    assert result.hops() == [1, 2]
    assert result.exact_match(3) is None
    assert result.metrics()["masked_share"] == pytest.approx(1 / 5)


def test_metrics_hold_scores_and_the_statistics_of_the_trajectories(result: EvaluationResult):
    metrics = result.metrics()
    assert metrics["questions"] == 5
    assert metrics["exact_match"] == 0.5
    assert metrics["exact_match/hops_2"] == pytest.approx(1 / 3)
    assert metrics["searches_per_trajectory"] == pytest.approx(4 / 5)
    assert metrics["stop_reason/answered"] == pytest.approx(3 / 5)


def test_without_anything_to_score_there_is_no_score():
    result = EvaluationResult((question("Ann"),), (ended(StopReason.SEARCH_UNAVAILABLE),))
    assert result.exact_match() is None
    assert "exact_match" not in result.metrics()
    assert result.hops() == []


def test_each_question_is_asked_once_and_in_order_whatever_the_batch_size(tokenizer):
    questions = [question("Ann"), question("Cy"), question("Bob")]
    prompts = [tokenizer.encode(f"who {name}") for name in ("ann", "bob", "cy")]
    generator = Parrot(tokenizer)
    collector = Collector(tokenizer, NoSearch(), PROTOCOL)
    result = evaluate(collector, generator, questions, prompts, batch_size=2)
    assert generator.calls == [2, 1]
    assert [trajectory.answer for trajectory in result.trajectories] == ["ann", "bob", "cy"]
    assert result.exact_match() == pytest.approx(1 / 3)
    assert result == evaluate(collector, generator, questions, prompts, batch_size=3)


def test_with_search_switched_off_every_search_finds_nothing(tokenizer):
    class Searcher:
        def generate(self, contexts, max_new_tokens):
            ids = tokenizer.encode("<search> ann </search>")
            return [Generation(tuple(ids), None, stopped=True) for _ in contexts]

    collector = Collector(tokenizer, NoSearch(), PROTOCOL)
    result = evaluate(collector, Searcher(), [question("Ann")], [tokenizer.encode("who")])
    assert [seen.text for seen in result.trajectories[0].observations] == ["<information> nothing </information>"] * 2
    assert result.metrics()["empty_search_share"] == 1


@pytest.mark.parametrize(
    ("questions", "prompts", "batch_size", "message"),
    [
        ([], [], 1, "0 prompts for 0 questions"),
        ([question("Ann")], [], 1, "0 prompts for 1 questions"),
        ([question("Ann")], [[1]], 0, "batch_size is 0"),
    ],
)
def test_bad_arguments_are_refused(
    tokenizer, questions: list[Question], prompts: list[list[int]], batch_size: int, message: str
):
    collector = Collector(tokenizer, NoSearch(), PROTOCOL)
    with pytest.raises(ValueError, match=message):
        evaluate(collector, Parrot(tokenizer), questions, prompts, batch_size)


def test_prompts_are_encoded_as_text_or_by_the_chat_template(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} : {{ m.content }}{% endfor %}"
    rows = [{"prompt": "who ann"}, {"prompt": [{"role": "user", "content": "who"}]}]
    assert encode_prompts(tokenizer, rows) == [
        [WORDS.index("who"), WORDS.index("ann")],
        [WORDS.index("user"), WORDS.index(":"), WORDS.index("who")],
    ]
