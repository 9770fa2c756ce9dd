"""The leaderboard's own solutions, damaged ones, hostile calls, and users who speak again."""

from __future__ import annotations

import gc
import json
import keyword
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

pytest.importorskip("bfcl_eval")

from tests.tools import qwen_tokenizer

from examples.bfcl import tasks as command
from examples.bfcl.calls import Call, WrongCall, read_calls
from examples.bfcl.environment import BFCLEnvironment, BFCLTools
from examples.bfcl.tasks import BFCL_SETS, Task, load_tasks, package, rows_of, task_of
from sorl_trl.qa import environment_reward, solved_reward
from sorl_trl.rollout import (
    ChatProtocol,
    Collector,
    EnvironmentResponder,
    Generation,
    RolloutLimits,
    environment_statistics,
)
from sorl_trl.rollout.chat import RolloutSetup
from sorl_trl.types import Action, ActionKind, StopReason, Turn

TASKS = [task for name in BFCL_SETS for task in load_tasks(name)]
FILES = task_of("multi_turn_base_1")
LS = Call("ls", (), {"a": True})


# -------------------------------------------------------------------------------------------------------------------
# Calls, read as literals, whatever a message holds
# -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "calls"),
    [
        ("[ls(a=True)]", [LS]),
        ("\n[cd('x'), ls(a=True)]\n", [Call("cd", ("x",)), LS]),
        ("```python\n[ls(a=True)]\n```", [LS]),
        ("cd('x'), ls(a=True)", [Call("cd", ("x",)), LS]),
        ("[ls(a=True)", [LS]),
        ("ls(a=True)]", [LS]),
        ("<think>[cd('x')]</think>\n[ls(a=True)]", [LS]),
        ("MathAPI.add(a=-1.5, b=[1, {'c': None}])", [Call("MathAPI.add", (), {"a": -1.5, "b": [1, {"c": None}]})]),
        ('<tool_call>\n{"name": "ls", "arguments": {"a": true}}\n</tool_call>', [LS]),
        ('First <tool_call>{"name": "cd"}</tool_call><tool_call>{"name": "ls"}</tool_call>', [Call("cd"), Call("ls")]),
        ("I have listed the folder.", []),
        ("[]", []),
        ("[Note] there is no such file (or folder).", []),
        (f"```{' ' * 16_000}x", []),  # in no time
    ],
)
def test_calls_are_read_in_order(message: str, calls: list[Call]) -> None:
    assert read_calls(message) == calls


@pytest.mark.parametrize(
    "message",
    [
        *("[ls(", "[ls()] and more", "ls()[0]", "ls() + ls()", "[ls()]; import os", "f('\0')", "[ls(), 1]"),
        *("open('/etc/passwd').read()", "f(x=g(1))", "f(x=__import__('os'))", "f(x=lambda: 1)", "f(**{'a': 1})"),
        *("f(x=1000000000000000)", "f(x=[{'y': -1000000000000000}])", f"f(x={'9' * 400}+1j)", f"f({'9' * 5000})"),
        *(f"[{', '.join(['f()'] * 101)}]", f"f({'(' * 51}", f"f({'-' * 9000}1)", f"f({'a+' * 6000}1)"),
        *(f"f('{'x' * 16_384}')", "<tool_call>{</tool_call>", "<tool_call>[1]</tool_call>"),
        *('<tool_call>{"name": "ls", "arguments": "a"}</tool_call>', '<tool_call>{"name": "ls"}'),
    ],
)
def test_what_cannot_be_read_is_refused(message: str) -> None:
    with pytest.raises(WrongCall):
        read_calls(message)


@given(st.text() | st.text(alphabet="f([{<>}])=,'\"\\x0-.#`") | st.text().map("f({})".format))
def test_no_message_does_more_than_be_refused(message: str) -> None:
    try:
        calls = read_calls(message)
    except WrongCall:
        return
    assert all(isinstance(call, Call) for call in calls)


class Slow:
    """Garbage that lets other threads go on when it is collected."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.sleep(0)


def test_threads_read_at_the_same_time() -> None:
    """Without a lock, Python 3.11 loses count where the collector runs in the middle of a tree."""
    before = gc.get_threshold()
    gc.set_threshold(20)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda _: (Slow(), read_calls("[f(a=[1, {'x': [(3, 4)]}])]"))[1], range(1000)))
    finally:
        gc.set_threshold(*before)
    assert found == [[Call("f", (), {"a": [1, {"x": [(3, 4)]}]})]] * 1000


names = st.from_regex(r"[a-z_]{1,8}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))
numbers = st.integers(-(10**15) + 1, 10**15 - 1) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(st.tuples(names, st.dictionaries(names, values, max_size=3)), min_size=1, max_size=3))
def test_what_is_written_is_read_again(calls: list[tuple[str, dict[str, Any]]]) -> None:
    expected = [Call(name, (), named) for name, named in calls]
    python = ", ".join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in named.items())})" for name, named in calls
    )
    assert read_calls(f"[{python}]") == expected
    texts = [json.dumps({"name": name, "arguments": named}) for name, named in calls]
    if not any("tool_call>" in text for text in texts):
        assert read_calls("".join(f"<tool_call>{text}</tool_call>" for text in texts)) == expected


# -------------------------------------------------------------------------------------------------------------------
# Worlds, and the leaderboard's verdicts
# -------------------------------------------------------------------------------------------------------------------


def begun(task: Task) -> BFCLEnvironment:
    environment = BFCLEnvironment()
    environment.reset(task.id)
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
        verdict = check(
            [[step] if step else [] for step in steps], [*map(list, task.solution)], entry, "", f"m{number}"
        )
        for name in [name for name in instances if name.startswith(f"m{number}_")]:
            del instances[name]  # or it would keep the worlds of all of them
        first = next(filter(None, played(task, steps).verdicts), None)
        expected = None if verdict["valid"] else verdict["error_type"].removeprefix("multi_turn:")
        assert first == expected, (task.id, steps)
        found.add(first)
    assert found == {None, "empty_turn_model_response", "instance_state_mismatch", "execution_response_mismatch"}


@pytest.mark.parametrize(
    ("call", "shown"),
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
def test_what_is_wrong_with_a_call_is_an_observation(call: str, shown: str) -> None:
    environment = begun(FILES)
    reply = say(environment, call)
    assert shown in reply.text
    assert (reply.stop, reply.role) == (None, "tool")
    assert sum(environment.errors.values()) == (0 if "No such" in shown else 1)
    assert "0x" not in reply.text, "an address in memory, which no two runs share"


@pytest.mark.parametrize(
    "call",
    [
        *("power(base=9, exponent=99999999)", "logarithm(value=2, base=3, precision=99999999)"),
        *("square_root(2, 99999999)", "square_root(number=2, precision='99999999')"),
        "round_number(number=5, decimal_places=-99999999)",
    ],
)
def test_no_short_call_computes_for_ever(call: str) -> None:
    task = next(task for task in TASKS if "MathAPI" in task.worlds)
    assert "must be a number of at most 1000" in say(begun(task), call).text
    assert "result" in say(begun(task), "power(base=2, exponent=10)").text
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
    within_itself = begun(FILES)
    say(within_itself, "[cp(source='workspace', destination='workspace'), du()]")
    say(within_itself, "Done.")
    assert within_itself.verdicts == ["instance_state_mismatch"]


def test_no_trajectory_changes_the_worlds_of_another() -> None:
    """As they do in the package: lists that are defaults, and tables of the long context, are the module's own."""
    task = next(task for task in TASKS if "TwitterAPI" in task.worlds)
    call = "post_tweet(content='x')"
    first, second = begun(task), begun(task)
    login = f"authenticate_twitter(username='{task.state['TwitterAPI']['username']}', "
    login += f"password='{task.state['TwitterAPI']['password']}')"
    for environment in (first, second):
        say(environment, login)
    number = json.loads(say(first, call).text)["id"]
    say(first, f"mention(tweet_id={number}, mentioned_usernames=['leak'])")
    assert '"mentions": []' in say(second, call).text
    travel = task_of("multi_turn_long_context_164")
    worlds = [begun(travel)._worlds._worlds["TravelAPI"] for _ in range(2)]
    assert all(a is not b for a, b in zip(*(world.credit_card_list.values() for world in worlds), strict=True))


def test_too_many_steps_end_the_trajectory() -> None:
    environment = begun(FILES)
    environment.most_steps = 3
    replies = [say(environment, "ls()") for _ in range(4)]
    assert [reply.stop for reply in replies] == [None] * 3 + [StopReason.ENVIRONMENT_DONE]
    assert not environment.solved
    assert environment.measures()["force_terminated"] == 1


class SolutionPolicy:
    """A `Generator` that answers each request with one message of its calls, and then reports that it is done."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task], compact: bool) -> None:
        self._tokenizer = tokenizer
        self.prompts = RolloutSetup(tokenizer).encode([row["prompt"] for row in rows_of(tasks, compact)])
        # A shortened task may be the beginning of another, with the same prompt.
        by_length = sorted(zip(map(tuple, self.prompts), tasks, strict=True), key=lambda each: len(each[1].requests))
        self._messages = {prompt: messages_of(task) for prompt, task in by_length}

    def generate(self, contexts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> list[Generation]:
        """See `Generator.generate`."""
        return [self._generate(context, most) for context, most in zip(contexts, max_new_tokens, strict=True)]

    def _generate(self, context: Sequence[int], most: int) -> Generation:
        prompt = next(prompt for prompt in self._messages if tuple(context[: len(prompt)]) == prompt)
        ends = list(context[len(prompt) :]).count(self._tokenizer.eos_token_id)  # of its messages and of the others'
        message = self._messages[prompt][ends // 2]
        ids = (*self._tokenizer.encode(message, add_special_tokens=False), self._tokenizer.eos_token_id)
        return Generation(ids[:most], None, stopped=len(ids) <= most)


def messages_of(task: Task) -> list[str]:
    """For each request the calls that solve it, if there are any, and that it is done."""
    made = (([f"[{', '.join(calls)}]"] if calls else []) + ["Done."] for calls in task.solution)
    return [message for messages in made for message in messages]


@pytest.mark.parametrize("compact", [False, True])
def test_users_speak_again_until_all_is_done(compact: bool) -> None:
    tokenizer: Any = qwen_tokenizer()
    tasks = [task_of(each) for each in ("multi_turn_base_1", "multi_turn_miss_func_3", "multi_turn_miss_param_0:2")]
    responder = EnvironmentResponder(BFCLEnvironment)
    limits = RolloutLimits(max_turns=200, max_turn_tokens=2000, max_observation_tokens=4000)
    collector = Collector(tokenizer, responder, ChatProtocol().in_chat(tokenizer), limits)
    policy, rows = SolutionPolicy(tokenizer, tasks, compact), rows_of(tasks, compact)
    trajectories = collector.collect(policy.prompts, policy, examples=rows)
    for task, trajectory in zip(tasks, trajectories, strict=True):
        assert trajectory.stop_reason is StopReason.ENVIRONMENT_DONE
        heard = [seen.text for seen in trajectory.observations if seen.role == "user"]
        assert len(heard) == len(task.requests) - 1
        assert all(request in text for text, request in zip(heard, task.requests[1:], strict=True))
        for number, documents in task.later.items():
            assert all(each["name"] in heard[number - 1] for each in documents)
        rewards = [turn.reward for turn in trajectory.turns if turn.reward is not None]
        assert rewards == [1 / len(task.requests)] * len(task.requests)
    assert solved_reward(trajectory=trajectories, environments=responder.environments) == [1.0] * 3
    assert [sum(each) for each in environment_reward(trajectory=trajectories)] == pytest.approx([1.0] * 3)
    found = environment_statistics(trajectories, responder)
    assert (found["solved"], found["solved_in_GorillaFileSystem"], found["wrong_call"]) == (1.0, 1.0, 0.0)


def test_trls_tools_bring_the_next_request() -> None:
    task = task_of("multi_turn_base_1:2")
    tools = BFCLTools()
    tools.reset(**rows_of([task])[0])
    assert "current_directory_content" in tools.call(f"[{task.solution[0][0]}]")
    assert tools.done() == task.requests[1]
    assert tools.get_reward() == 0.5
    tools.call(f"[{', '.join(task.solution[1])}]")
    assert "That was all" in tools.done()
    assert "That was all" in tools.done()
    assert (tools.solved, tools.get_reward()) == (True, 1.0)
    assert tools.call("hello") == "there is no call in that"


def test_shortened_tasks_know_what_they_need() -> None:
    task = task_of("multi_turn_base_1:2")
    assert task.worlds == ("GorillaFileSystem",)
    assert {each["name"] for each in task.functions} == {"ls", "cd", "mv"}
    assert played(task, task.solution).solved
    for wrong in ("multi_turn_base_1:99", "multi_turn_base_1:x", "multi_turn_base_999", "simple_1", "base_1"):
        with pytest.raises(ValueError):
            task_of(wrong)


def test_the_command_writes_rows(tmp_path: Any) -> None:
    command.main([str(tmp_path / "own.jsonl"), "--sets", "base", "--limit", "2", "--compact", "--no_system"])
    first, second = map(json.loads, (tmp_path / "own.jsonl").read_text().splitlines())
    assert (first["task"], second["id"], first["compact"]) == ("multi_turn_base_0", "multi_turn_base_1", True)
    (message,) = second["prompt"]
    assert message["content"].startswith("You call functions") and message["content"].endswith(FILES.requests[0])
