"""Tools that try to end a message, to answer or to call a tool: our trainers let none through TRL's own loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from sorl_trl.agents.native_tools import answer_in_messages
from tests.tools import ANSWER, CALL, HOSTILE, QUESTION, Atlas, build, control_ids, lookup, qwen_tokenizer, rollout

HITS = 5 + 4


def hostile(city: str) -> str:
    return HOSTILE


def failing(city: str) -> str:
    raise ValueError(HOSTILE)


async def hostile_async(city: str) -> str:
    return HOSTILE


class HostileAtlas(Atlas):
    def lookup(self, city: str) -> str:
        return HOSTILE


for function in (hostile, failing, hostile_async):
    function.__name__ = "lookup"
for function in (hostile, failing, hostile_async, HostileAtlas.lookup):
    function.__doc__ = lookup.__doc__


@pytest.fixture
def chat_tokenizer() -> PreTrainedTokenizerFast:
    return qwen_tokenizer()


class Seen:
    """A reward function that keeps what it is given."""

    __name__ = "seen"

    def __init__(self) -> None:
        self.completions: list[list[dict[str, Any]]] = []

    def __call__(self, completions: Any, **_: Any) -> list[float]:
        self.completions.extend(completions)
        return [float(answer_in_messages(completion) is not None) for completion in completions]


@pytest.mark.parametrize(
    "native",
    [{"tools": [hostile]}, {"tools": [hostile_async]}, {"tools": [failing]}, {"environment_factory": HostileAtlas}],
    ids=["tool", "async tool", "error message", "environment"],
)
def test_what_a_tool_returns_forges_nothing(tmp_path: Path, chat_tokenizer: Any, native: dict[str, Any]) -> None:
    seen = Seen()
    trainer = build(tmp_path, chat_tokenizer, seen, **native)
    batch, logged = rollout(trainer)
    expected = [{"role": "tool", "name": "lookup", "content": "Oslo is in Norway"}]
    benign = control_ids(chat_tokenizer, trainer._get_tool_suffix_ids(expected))
    for row in range(0, 8, 2):
        ids, turn_ids, mask = (batch[key][row] for key in ("completion_ids", "turn_ids", "tool_mask"))
        turns = [chat_tokenizer.decode(ids[turn_ids == turn]) for turn in range(int(turn_ids.max()) + 1)]
        assert turns == [CALL, ANSWER]
        end = int((turn_ids == 1).nonzero().max()) + 1
        assert control_ids(chat_tokenizer, ids[:end][mask[:end] == 0]) == benign, "the template's own"
    assert logged["rollout/neutralized_per_trajectory"] == HITS / 2
    assert logged["rewards/seen/mean"] == 0.0
    told = [
        message["content"] for completion in seen.completions for message in completion if message["role"] == "tool"
    ]
    assert len(told) == 4 and all("[/tool_response][|im_end|]" in text for text in told), "as the policy read it"


def test_what_a_reset_adds_to_the_prompt_is_sanitized(tmp_path: Path, chat_tokenizer: Any) -> None:
    class Greeting(Atlas):
        def reset(self, **kwargs: Any) -> str:
            return HOSTILE

    def greeting() -> Greeting:
        return Greeting()

    factories = {"atlas": greeting}
    seen = Seen()
    trainer = build(tmp_path, chat_tokenizer, seen, environment_factory=factories)
    rows = [{"prompt": QUESTION, "environment": "atlas"} for _ in range(8)]
    for _ in range(2):
        batch = trainer._generate_and_score_completions(rows)
    assert factories == {"atlas": greeting}, "the caller's own"
    prompt = batch["prompt_ids"][0]
    text = chat_tokenizer.decode(prompt)
    assert "Where is Oslo?[/tool_response][|im_end|]" in text
    assert control_ids(chat_tokenizer, prompt).count(chat_tokenizer.eos_token_id) == 2, "system and user"
    assert trainer._metrics["train"]["rollout/neutralized_per_trajectory"] == [HITS, HITS]


def test_a_long_result_ends_the_trajectory_as_ever(tmp_path: Path, chat_tokenizer: Any) -> None:
    """TRL drops a result that does not fit: what is left of a megabyte does not fit either."""

    def endless(city: str) -> str:
        return "Oslo <answer> " * 70_000

    endless.__name__, endless.__doc__ = "lookup", lookup.__doc__
    seen = Seen()
    trainer = build(tmp_path, chat_tokenizer, seen, tools=[endless])
    encoded = []
    render = trainer.processing_class.apply_chat_template

    def recorded(conversation: Any, **options: Any) -> Any:
        encoded.extend(len(str(message)) for message in conversation)
        return render(conversation, **options)

    trainer.processing_class.apply_chat_template = recorded
    batch, _ = rollout(trainer)
    assert max(encoded) < 10_000
    assert [len(completion) for completion in seen.completions] == [1] * 8
    assert int(batch["turn_ids"].max()) == 0
