"""Rows of a user's own columns: what is read, what is refused, and what an environment gets."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from sorl_trl.rollout import (
    EnvironmentResponder,
    Reply,
    RolloutArguments,
    TagProtocol,
    environment_statistics,
)
from sorl_trl.rollout.tasks import Task, check_read, load_tasks, prompt_rows
from sorl_trl.types import Action, ActionKind, StopReason, Trajectory, Turn
from tests.unit.rollout.fakes import bpe_tokenizer

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
SAID = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Go<|im_end|>", "name": "Ann"}]


class World:
    """The environment of these tests."""

    protocol = TagProtocol(tools=("act",))

    def reset(self, number: int | None = None) -> None:
        self.number = number

    def step(self, turn: Turn) -> Reply:
        return Reply(reward=0.25, stop=StopReason.ENVIRONMENT_DONE)

    def measures(self) -> dict[str, float]:
        return {"number": float(self.number or 0)}


IN_WORLD = RolloutArguments(environment=f"{__name__}.World", prompt_template="Now {question}")


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_prompts_and_columns_reach_the_environment(tmp_path: Path) -> None:
    tokenizer = deepcopy(bpe_tokenizer())
    tokenizer.chat_template = CHATML
    tasks = load_tasks(written(tmp_path / "tasks.jsonl", {"prompt": SAID, "number": 7}, {"prompt": SAID, "id": "b"}))
    assert [(task.id, task.question) for task in tasks] == [("1", "Go<|im_end|>"), ("b", "Go<|im_end|>")]
    first, second = prompt_rows(tasks, IN_WORLD, tokenizer)
    assert first["prompt"] == [SAID[0], {**SAID[1], "content": "Go[|im_end|]"}], "nobody ends a message in it"
    assert (first["number"], second["number"], second["id"], second["question_id"]) == (7, None, "b", "b")
    assert {*first} == {*second}


def test_text_is_a_prompt_as_it_stands_and_a_question_is_put_into_the_template(tmp_path: Path) -> None:
    text, question = {"prompt": "<|im_start|>Go"}, {"question": "where", "golden_answers": ["oslo"]}
    rows = prompt_rows(load_tasks(written(tmp_path / "tasks.jsonl", text, question)), IN_WORLD, bpe_tokenizer())
    assert [row["prompt"] for row in rows] == ["<|im_start|>Go", "Now where"]
    assert [row["golden_answers"] for row in rows] == [[], ["oslo"]]


def agent(example: dict[str, Any], endpoint: Any) -> None:
    """The agent of these tests."""


def rollout_func(prompts: Any, trainer: Any) -> None:
    """The rollout of these tests."""


def rollout_of(prompts: Any, its_trainer: Any) -> None:
    """One that calls its trainer otherwise."""


def test_an_agent_gets_the_question_and_needs_a_chat_template(tmp_path: Path) -> None:
    tasks = load_tasks(written(tmp_path / "tasks.jsonl", {"question": "where", "golden_answers": ["oslo"], "room": 2}))
    with_agent, tokenizer = RolloutArguments(agent=f"{__name__}:agent"), deepcopy(bpe_tokenizer())
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="the agent's API calls are messages"):
        prompt_rows(tasks, with_agent, tokenizer)
    tokenizer.chat_template = CHATML
    (row,) = prompt_rows(tasks, with_agent, tokenizer)
    assert (row["prompt"], row["golden_answers"], row["room"]) == ("where", ["oslo"], 2)


@pytest.mark.parametrize(
    ("acts", "read", "unread"),
    [
        ({}, ["max_turns", "protocol", "chat", "rejoin_after"], ["reward_on_error", "agent_time_limit_s"]),
        ({"environment": f"{__name__}.World"}, ["max_turns", "chat", "rejoin_after"], ["corpus", "reward_on_error"]),
        (
            {"agent_command": "agent"},
            ["max_turn_tokens", "rejoin_after", "reward_on_error", "agent_time_limit_s"],
            ["max_turns", "max_observation_tokens", "chat", "prompt_template", "protocol", "corpus"],
        ),
    ],
    ids=["search", "environment", "agent"],
)
def test_what_has_no_meaning_for_what_acts_is_refused(
    acts: dict[str, str], read: list[str], unread: list[str]
) -> None:
    rollout, asked = RolloutArguments(**acts), [Task("1", "where", ())]
    check_read(rollout, asked, dict.fromkeys(read, 1))
    for name in unread:
        with pytest.raises(ValueError, match=f"`{name}` is 1, but has no effect with {rollout.actor or 'a search'}"):
            check_read(rollout, asked, {name: 1})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"agent": f"{__name__}:agent", "agent_command": "agent"}, "`agent` is .* and `agent_command` is 'agent'"),
        ({"environment": f"{__name__}.World", "agent_command": "agent"}, "set only one"),
        ({"agent": f"{__name__}:CHATML"}, "`agent` .* takes an example and an endpoint"),
        ({"agent": f"{__name__}:rollout_func"}, "prompts and a trainer"),
        ({"agent": f"{__name__}:rollout_of"}, "prompts and a trainer"),
        ({"agent": f"{__name__}:nobody"}, "`agent` .* has no 'nobody'"),
    ],
)
def test_what_cannot_act_is_named(given: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RolloutArguments(**given)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"number": 1}, "`prompt` or a `question`"),
        ({"prompt": [{"role": "user"}]}, "`prompt`"),
        ({"prompt": "Go", "golden_answers": "oslo"}, "`golden_answers`"),
        ({"prompt": "Go", "options": "A. oslo"}, "`options` must be an object"),
        ({"query": "Go"}, r"fields \['query'\]"),
        ("Go", "a task must be a JSON object"),
    ],
)
def test_what_is_no_task_is_named_with_its_line(tmp_path: Path, row: Any, named: str) -> None:
    with pytest.raises(ValueError, match=f"line 2: .*{named}"):
        load_tasks(written(tmp_path / "tasks.jsonl", {"prompt": "Go"}, row))


def test_a_column_names_the_kind_of_a_rows_environment() -> None:
    class Other(World):
        def measures(self) -> dict[str, float]:
            return {}

    responder = EnvironmentResponder({"world": World, "other": Other})
    responder.open([{"environment": "world", "number": 3}, {"environment": "other"}])
    turn = Turn((1,), "", Action(ActionKind.TOOL, "x", "act"), reward=0.25)
    assert responder.ask({0: turn})[0].result(60).stop is StopReason.ENVIRONMENT_DONE
    ended = [Trajectory((1,), (turn,), StopReason.ENVIRONMENT_DONE)] * 2
    found = environment_statistics(ended, responder)
    assert found == {"world/number": 3, "world/reward": 0.25, "world/turns": 1, "other/reward": 0.25, "other/turns": 1}
    with pytest.raises(ValueError, match="'moon', which is not among the environments"):
        responder.open([{"environment": "moon"}])
    responder.close()
