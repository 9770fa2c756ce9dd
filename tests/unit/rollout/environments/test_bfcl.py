"""The leaderboard's worlds: its own solutions, damaged ones, hostile calls, and users who speak again."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

pytest.importorskip("bfcl_eval")

from benchmarks.bfcl_solutions import SolutionPolicy
from sorl_trl.rollout.environments.bfcl import (
    BFCL_SETS,
    BFCLEnvironment,
    BFCLTools,
    Task,
    are_tasks,
    load_tasks,
    prompt_rows,
    question_of,
    takes_system,
    task_of,
)
from sorl_trl.rollout.environments.bfcl.tasks import package

from sorl_trl.qa import environment_reward, solved_reward
from sorl_trl.rollout import (
    ChatProtocol,
    Collector,
    EnvironmentResponder,
    RolloutLimits,
    RowTurn,
    environment_statistics,
)
from sorl_trl.rollout.environments.tools import Unavailable
from sorl_trl.types import Action, ActionKind, StopReason, Turn
from tests.tools import qwen_tokenizer

TASKS = [task for name in BFCL_SETS for task in load_tasks(name)]
FILES = task_of("multi_turn_base_1")
LIMITS = RolloutLimits(max_turns=200, max_turn_tokens=2000, max_observation_tokens=4000)


def begun(task: Task, **options: Any) -> BFCLEnvironment:
    environment = BFCLEnvironment(**options)
    environment.reset(prompt_rows([task])[0]["prompt"])
    return environment


def say(environment: BFCLEnvironment, text: str) -> Any:
    return environment.step(Turn((1,), text, Action(ActionKind.MESSAGE, text)))


def played(task: Task, steps: Sequence[Sequence[str]]) -> BFCLEnvironment:
    environment = begun(task)
    for calls in steps:
        if calls:
            say(environment, f"[{', '.join(calls)}]")
        say(environment, "Done.")
    return environment


def test_all_solutions_pass() -> None:
    calls = 0
    for task in TASKS:
        environment = played(task, task.solution)
        calls += environment.calls
        assert environment.solved, task.id
    assert (len(TASKS), calls) == (800, 4625)


def damaged(task: Task, rng: random.Random) -> list[list[str]]:
    """The solution with a call less, twice, at another place, or with another argument."""
    steps = [list(calls) for calls in task.solution]
    calls = rng.choice([step for step in steps if step])
    place = rng.randrange(len(calls))
    how = rng.choice(["drop", "silent", "twice", "swap", "argument", "name"])
    if how == "drop":
        del calls[place]
    elif how == "silent":
        calls.clear()
    elif how == "twice":
        calls.append(calls[place])
    elif how == "swap":
        other = rng.randrange(len(calls))
        calls[place], calls[other] = calls[other], calls[place]
    elif how == "argument":
        calls[place] = calls[place].replace("='", "='x", 1).replace("=1", "=2", 1)
    else:
        calls[place] = f"no_{calls[place]}"
    return steps


def test_verdicts_are_the_leaderboards_on_damaged_solutions() -> None:
    check = package("eval_checker.multi_turn_eval.multi_turn_checker").multi_turn_checker
    instances = vars(package("eval_checker.multi_turn_eval.multi_turn_utils"))
    rng, found = random.Random(0), set()
    for number in range(400):
        task = rng.choice(TASKS)
        steps = damaged(task, rng)
        entry = {"initial_config": task.state, "involved_classes": task.worlds, "id": task.id}
        said = check([[step] if step else [] for step in steps], [*map(list, task.solution)], entry, "", f"m{number}")
        for name in [name for name in instances if name.startswith(f"m{number}_")]:
            del instances[name]  # or it would keep the worlds of all of them
        verdicts = played(task, steps).verdicts
        first = next(filter(None, verdicts), None)
        assert first == (None if said["valid"] else said["error_type"].removeprefix("multi_turn:")), (task.id, steps)
        found.add(first)
    assert found == {None, "empty_turn_model_response", "instance_state_mismatch", "execution_response_mismatch"}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("fly(to='moon')", "Error: there is no function fly"),
        ("GorillaFileSystem.fly()", "Error: there is no function GorillaFileSystem.fly"),
        ("_load_scenario({})", "Error: there is no function _load_scenario"),
        ("cd(where='x')", "unexpected keyword argument 'where'"),
        ("cd(folder=7)", "Error during execution"),
        ("cat(file_name='none.txt')", "No such file"),
        ("ls(", "Error: the calls cannot be read"),
    ],
)
def test_what_is_wrong_with_a_call_is_an_observation(call: str, said: str) -> None:
    environment = begun(FILES)
    reply = say(environment, call)
    assert said in reply.text
    assert (reply.stop, reply.role) == (None, "tool")
    assert sum(environment.errors.values()) == (0 if "No such" in said else 1)
    assert "0x" not in reply.text, "an address in memory, which no two runs share"


@pytest.mark.parametrize(
    "call",
    [
        "power(base=9, exponent=99999999)",
        "logarithm(value=2, base=3, precision=99999999)",
        "square_root(2, 99999999)",
        "round_number(number=5, decimal_places=-99999999)",
        "square_root(number=2, precision='99999999')",
    ],
)
def test_no_short_call_computes_for_ever(call: str) -> None:
    task = next(task for task in TASKS if "MathAPI" in task.worlds)
    assert "must be a number of at most 1000" in say(begun(task), call).text
    assert "result" in say(begun(task), "power(base=2, exponent=10)").text
    assert "Exceeds the limit" in say(begun(task), "power(base=999999999999999, exponent=1000)").text
    assert "at most 255 characters" in say(begun(FILES), f"mkdir(dir_name='{'x' * 256}')").text


def test_a_file_system_cannot_grow_without_end() -> None:
    environment = begun(FILES)
    for number in range(20):  # of 2**20 paths, which would lead to a few dozen objects
        deeper = f"d{number}"
        reply = say(
            environment,
            f"[cp(source='workspace', destination='b'), mkdir(dir_name='{deeper}'), "
            f"mv(source='workspace', destination='{deeper}'), mv(source='b', destination='{deeper}'), "
            f"mv(source='{deeper}', destination='workspace')]",
        )
    assert "the file system is full" in reply.text
    say(environment, "Done.")
    assert environment.verdicts == ["instance_state_mismatch"]


def test_no_trajectory_changes_the_worlds_of_another() -> None:
    """As they do in the package: lists that are defaults, and tables of the long context, are the module's own."""
    task = next(task for task in TASKS if "TwitterAPI" in task.worlds)
    call = "post_tweet(content='x')"
    first, second = begun(task), begun(task)
    login = f"authenticate_twitter(username='{task.state['TwitterAPI']['username']}', "
    login += f"password='{task.state['TwitterAPI']['password']}')"
    for environment in (first, second):
        say(environment, login)
    assert '"mentions": []' in say(first, call).text
    number = json.loads(say(first, call).text)["id"]
    say(first, f"mention(tweet_id={number}, mentioned_usernames=['leak'])")
    assert '"mentions": []' in say(second, call).text
    travel = task_of("multi_turn_long_context_164")
    worlds = [begun(travel)._worlds._worlds["TravelAPI"] for _ in range(2)]
    assert all(a is not b for a, b in zip(*(world.credit_card_list.values() for world in worlds), strict=True))


def test_a_folder_within_itself_ends_nothing() -> None:
    environment = begun(FILES)
    say(environment, "[cp(source='workspace', destination='workspace'), du()]")
    say(environment, "Done.")
    assert environment.verdicts == ["instance_state_mismatch"]


def test_too_many_steps_end_the_trajectory() -> None:
    environment = begun(FILES, most_steps=3)
    replies = [say(environment, "ls()") for _ in range(4)]
    assert [reply.stop for reply in replies] == [None] * 3 + [StopReason.ENVIRONMENT_DONE]
    assert not environment.solved
    assert environment.measures()["force_terminated"] == 1


def test_names_that_tools_and_worlds_share_are_written_with_their_world() -> None:
    def add(a: float, b: float) -> float:
        return -1.0

    task = next(task for task in TASKS if "MathAPI" in task.worlds)
    environment = begun(task, tools=[add])
    assert "write MathAPI.add or tools.add" in say(environment, "add(a=1, b=2)").text
    assert say(environment, "[MathAPI.add(a=1, b=2), tools.add(1, 2)]").text == '{"result": 3}\n-1.0'
    assert say(begun(task, tools=[sum]), "sum([1, 2])").text == "3"
    with pytest.raises(ValueError, match="a name of its own"):
        begun(task, tools=[add, add])

    async def later() -> None: ...

    with pytest.raises(TypeError, match="coroutine"):
        begun(task, tools=[later])


def test_a_tool_that_is_down_masks_the_trajectory() -> None:
    def search(query: str) -> str:
        return Unavailable("gone")

    responder = EnvironmentResponder(partial(BFCLEnvironment, tools=[search]))
    responder.open(prompt_rows([FILES]))
    turn = Turn((1,), "", Action(ActionKind.MESSAGE, "search(query='x')"))
    (reply,) = responder.ask([RowTurn(0, turn)])
    assert reply.result(60).stop is StopReason.ENVIRONMENT_UNAVAILABLE
    responder.close()


@pytest.mark.parametrize("compact", [False, True])
def test_users_speak_again_until_all_is_done(compact: bool) -> None:
    tokenizer: Any = qwen_tokenizer()
    tasks = [task_of(each) for each in ("multi_turn_base_1", "multi_turn_miss_func_3", "multi_turn_miss_param_0:2")]
    responder = EnvironmentResponder(partial(BFCLEnvironment, compact))
    collector = Collector(tokenizer, responder, ChatProtocol().in_chat(tokenizer), LIMITS)
    policy, rows = SolutionPolicy(tokenizer, tasks, compact), prompt_rows(tasks, compact)
    trajectories = collector.collect(policy.prompts, policy, examples=rows)
    for task, trajectory in zip(tasks, trajectories, strict=True):
        assert trajectory.stop_reason is StopReason.ENVIRONMENT_DONE
        heard = [seen.text for seen in trajectory.observations if seen.role == "user"]
        assert len(heard) == len(task.requests) - 1
        for said, request in zip(heard, task.requests[1:], strict=True):
            assert request in said
        for number, documents in task.later.items():
            assert all(each["name"] in heard[number - 1] for each in documents)
            assert "What about now?" in heard[number - 1]
        share = 1 / len(task.requests)
        rewards = [turn.reward for turn in trajectory.turns if turn.reward is not None]
        assert rewards == [share] * len(task.requests)
    assert solved_reward(trajectory=trajectories, environments=responder.environments) == [1.0] * 3
    assert [sum(each) for each in environment_reward(trajectory=trajectories)] == pytest.approx([1.0] * 3)
    found = environment_statistics(trajectories, responder)
    assert (found["solved"], found["reward"], found["wrong_call"]) == (1.0, pytest.approx(1.0), 0.0)


def test_trls_tools_bring_the_next_request() -> None:
    task = task_of("multi_turn_base_1:2")
    tools = BFCLTools()
    tools.reset(**prompt_rows([task])[0], other_column=1)
    assert "current_directory_content" in tools.call(f"[{task.solution[0][0]}]")
    assert tools.done() == task.requests[1]
    assert tools.get_reward() == 0.5
    tools.call(f"[{', '.join(task.solution[1])}]")
    assert "That was all" in tools.done()
    assert "That was all" in tools.done()
    assert tools.solved
    assert tools.get_reward() == 1.0
    assert "cannot be read" in tools.call("[ls(")
    assert tools.call("hello") == "there is no call in that"


def test_shortened_tasks_know_what_they_need() -> None:
    task = task_of("multi_turn_base_1:2")
    assert task.worlds == ("GorillaFileSystem",)
    assert {each["name"] for each in task.functions} == {"ls", "cd", "mv"}
    assert played(task, task.solution).solved
    for wrong in ("multi_turn_base_1:99", "multi_turn_base_1:x", "multi_turn_base_999", "simple_1", "base_1"):
        with pytest.raises(ValueError):
            task_of(wrong)
    with pytest.raises(ValueError, match="names no task"):
        BFCLEnvironment().reset([{"role": "user", "content": "Hello"}])


def test_rows_are_the_leaderboards_or_are_refused() -> None:
    question = question_of(FILES)
    assert are_tasks([question])
    assert not are_tasks([replace(question, data_source="")])
    with pytest.raises(ValueError, match="something else"):
        are_tasks([replace(question, question="Delete all files.")])


def test_a_template_without_system_messages_has_the_rules_in_the_users() -> None:
    tokenizer: Any = qwen_tokenizer()
    assert takes_system(tokenizer)
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    assert not takes_system(tokenizer)
    (row,) = prompt_rows([FILES], compact=True, system=False)
    (message,) = row["prompt"]
    assert message["role"] == "user"
    assert message["content"].startswith("You call functions") and message["content"].endswith(FILES.requests[0])
