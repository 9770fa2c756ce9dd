"""A `ToolBox` with a `ChatProtocol`: tools that the chat template shows, called as in TRL's own tool loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers.utils import DocstringParsingException

from sorl_trl import AgentRollout, SOGRPOConfig, SOGRPOTrainer, search_tool
from sorl_trl.rollout import ChatProtocol, Collector, Generation, RolloutLimits, ToolBox
from sorl_trl.search import NoSearch
from sorl_trl.types import StopReason, Trajectory
from tests.policies import build_policy
from tests.tools import ANSWER, CALL, QUESTION, Atlas, build, lookup, qwen_tokenizer, tool_call
from tests.training import settings

TOKENIZER: Any = qwen_tokenizer()
PROTOCOL = ChatProtocol()
LIMITS = RolloutLimits(max_turns=4, max_turn_tokens=400, max_observation_tokens=400)


class Scripted:
    """In place of an engine: says the messages of a script, one after the other, to all rows."""

    window = None

    def __init__(self, *messages: str) -> None:
        self.messages = [TOKENIZER.encode(message, add_special_tokens=False) for message in messages]
        self.heard: list[str] = []

    def generate(self, contexts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> list[Generation]:
        ids = self.messages.pop(0)
        self.heard.append(TOKENIZER.decode(contexts[0]))
        return [Generation(tuple(ids), None, stopped=True) for _ in contexts]


def batch_of(trainer: Any) -> dict[str, Any]:
    batch: dict[str, Any] = trainer._generate_and_score_completions([{"prompt": QUESTION} for _ in range(8)])
    return batch


@pytest.mark.parametrize("native", [{"tools": [lookup]}, {"environment_factory": Atlas}], ids=["tools", "object"])
def test_prompts_and_trajectories_are_those_of_trls_tool_loop(tmp_path: Path, native: dict[str, Any]) -> None:
    theirs = batch_of(build(tmp_path / "theirs", TOKENIZER, lambda **_: [0.0] * 8, **native))
    rollout = AgentRollout(ToolBox(**native, protocol=PROTOCOL), limits=LIMITS)
    trainer = build(tmp_path / "ours", TOKENIZER, lambda **_: [0.0] * 8, rollout_func=rollout)
    trainer.engine_ahead = Scripted(CALL, ANSWER)
    ours = batch_of(trainer)
    for row in (0, 2):  # the others answer at once in TRL's
        for key in ("prompt_ids", "completion_ids", "turn_ids"):
            assert ours[key][row].tolist() == theirs[key][row].tolist(), key


class Sum:
    def reset(self, start: int = 0) -> str:
        self.total = start
        return f"The sum is {start}."

    def add(self, number: int) -> str:
        """
        Add to the sum.

        Args:
            number: How much.
        """
        self.total += number
        return str(self.total)

    def get_reward(self) -> float:
        return float(self.total)


async def double(number: float) -> str:
    """
    Double a number.

    Args:
        number: It.
    """
    return f"{2 * number:g}"


class Notebook:
    def reset(self) -> None:
        self.lines: list[str] = []

    async def write(self, line: str) -> str:
        """
        Write a line.

        Args:
            line: It.
        """
        await asyncio.sleep(0)
        self.lines.append(line)
        return "written"

    def read(self) -> str:
        """Read all lines."""
        return ", ".join(self.lines)


def broken() -> str:
    """Fail."""
    raise ConnectionError("no route")


def collected(*messages: str) -> tuple[Trajectory, ToolBox, list[str]]:
    box = ToolBox([double, broken], Sum, protocol=PROTOCOL)
    engine = Scripted(*(f"{message}<|im_end|>" for message in messages))
    collector = Collector(TOKENIZER, box, PROTOCOL.in_chat(TOKENIZER), LIMITS)
    box.greet([{"start": 1}])
    (trajectory,) = collector.collect([TOKENIZER.encode("Begin.")], engine, examples=[{"start": 1}])
    return trajectory, box, engine.heard


def test_a_message_calls_several_tools_in_order() -> None:
    calls = tool_call("add", number=2) + tool_call("double", number="4") + tool_call("add", number=3)
    trajectory, box, heard = collected(f"Let me see.\n{calls}", "It is print(6).")
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_DONE
    assert "<tool_response>\n3\n8\n6\n</tool_response>" in heard[1]
    assert box.environments[0].total == 6


def test_calls_of_coroutines_and_functions_are_made_in_order() -> None:
    message = tool_call("write", line="a") + tool_call("read") + tool_call("write", line="b") + tool_call("read")
    box = ToolBox([broken], Notebook, protocol=PROTOCOL)
    engine = Scripted(f"{message}<|im_end|>", f"{tool_call('write', line='c')}{tool_call('broken')}<|im_end|>")
    collector = Collector(TOKENIZER, box, PROTOCOL.in_chat(TOKENIZER), LIMITS)
    (trajectory,) = collector.collect([TOKENIZER.encode("Begin.")], engine)
    assert "<tool_response>\nwritten\na\nwritten\na, b\n</tool_response>" in engine.heard[1]
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_UNAVAILABLE
    assert box.environments[0].lines == ["a", "b", "c"]


@pytest.mark.parametrize(
    "message", ["f(x) grows.", "<think>no <tool_call> yet</think>add(number=1) would do.", "[add(number=1)]"]
)
def test_calls_are_json_alone(message: str) -> None:
    trajectory, box, heard = collected(message)
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_DONE
    assert (box.environments[0].total, len(heard)) == (1, 1)
    trajectory, box, _ = collected(f"Step(s): one.\n{tool_call('add', number=10**16)}", "Done.")
    assert box.environments[0].total == 1 + 10**16


def test_what_is_wrong_with_a_call_is_said() -> None:
    wrong = ["<tool_call>{", tool_call("subtract", number=1), tool_call("add", amount=1)]
    trajectory, _, heard = collected(*wrong, "I give up.")
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_DONE
    said = [text.rpartition("<tool_response>\n")[2].partition("\n</tool_response>")[0] for text in heard[1:]]
    assert said[0].startswith("error: each")
    assert said[1] == "error: there is no subtract here, only double, broken, add"
    assert said[2].startswith("error: add: ")
    assert "number" in said[2]


def test_a_tool_that_is_down_ends_the_trajectory() -> None:
    trajectory, _, _ = collected(tool_call("add", number=1) + tool_call("broken"))
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_UNAVAILABLE


@pytest.mark.parametrize("options", [{}, {"async_staleness": 1}], ids=["at once", "ahead"])
def test_trains(tmp_path: Path, options: dict[str, Any]) -> None:
    box = ToolBox([double], {"sum": Sum, "atlas": Atlas}, protocol=PROTOCOL)
    seen: list[str] = []

    def reward(prompts: Any, completions: Any, environments: Any, **_: Any) -> list[float]:
        seen.extend(type(each).__name__ for each in environments)
        return [float(len(completion[0]["content"])) for completion in completions]

    rows = [{"prompt": QUESTION, "environment": name} for name in ("sum", "atlas")] * 8
    trainer = SOGRPOTrainer(
        build_policy(vocab_size=len(TOKENIZER)),
        reward,
        SOGRPOConfig(**settings(tmp_path, max_completion_length=64, max_steps=3, **options)),
        Dataset.from_list(rows),
        processing_class=TOKENIZER,
        rollout_func=AgentRollout(box, limits=RolloutLimits(max_turns=2, max_turn_tokens=24)),
    )
    shown = trainer.rollout_func.__wrapped__
    box.kinds = ["sum", "atlas"]
    for ids, own, other in zip(
        shown._encoded([QUESTION, QUESTION], trainer, box), ('"add"', '"lookup"'), ('"lookup"', '"add"'), strict=True
    ):
        prompt = TOKENIZER.decode(ids)
        assert own in prompt
        assert '"double"' in prompt
        assert other not in prompt
    trainer.train()
    assert trainer.state.global_step == 3
    assert {*seen} == {"Sum", "Atlas"}


def test_refuses_a_template_without_tools_and_a_tag_for_searches(tmp_path: Path) -> None:
    plain: Any = qwen_tokenizer()
    plain.chat_template = "{% for m in messages %}<|im_start|>{{ m['role'] + m['content'] }}<|im_end|>{% endfor %}"
    rollout = AgentRollout(ToolBox([lookup], protocol=PROTOCOL), limits=LIMITS)
    with pytest.raises(ValueError, match="the chat template shows no tool calls"):
        build(tmp_path, plain, lambda **_: [0.0] * 8, rollout_func=rollout)
    plain.chat_template = TOKENIZER.chat_template.replace("<tool_call>", "<call>")
    with pytest.raises(ValueError, match="does not write calls as JSON between <tool_call> tags"):
        build(tmp_path, plain, lambda **_: [0.0] * 8, rollout_func=rollout)
    with pytest.raises(DocstringParsingException):
        ToolBox([lambda number: number], protocol=PROTOCOL)
    with pytest.raises(ValueError, match=r"add `search_tool\(engine\)` to the tools"):
        ToolBox(search=NoSearch(), protocol=PROTOCOL)
    assert [tool.__name__ for tool in ToolBox([search_tool(NoSearch())], protocol=PROTOCOL).shown[None]] == ["search"]
