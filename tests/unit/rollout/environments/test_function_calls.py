"""What a message calls: read as literals, whatever it holds."""

from __future__ import annotations

import gc
import json
import keyword
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sorl_trl.rollout.environments.function_calls import Call, WrongCall, read_calls

LS = Call("ls", (), {"a": True})


@pytest.mark.parametrize(
    ("message", "calls"),
    [
        ("[ls(a=True)]", [LS]),
        ("ls(a=True)", [LS]),
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
        ("", []),
        ("[]", []),
        ("[Note] there is no such file (or folder).", []),
        (f"```{' ' * 16_000}x", []),  # in no time
    ],
)
def test_calls_are_read_in_order(message: str, calls: list[Call]) -> None:
    assert read_calls(message) == calls


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("[ls(", "cannot be read"),
        ("[ls()] and more", "cannot be read"),
        ("ls()[0]", "cannot be read|nothing else"),
        ("ls() + ls()", "cannot be read|nothing else"),
        ("[ls(), pwd(", "cannot be read"),
        ("[ls()]; import os", "cannot be read"),
        ("f('\0')", "cannot be read"),
        ("[ls(), 1]", "nothing else"),
        ("open('/etc/passwd').read()", "by its name"),
        ("f(x=g(1))", "must be literals"),
        ("f(x=__import__('os'))", "must be literals"),
        ("f(x=lambda: 1)", "must be literals"),
        ("f(**{'a': 1})", "name of its own"),
        ("f(x=1000000000000000)", "15 digits"),
        (f"f(x={'9' * 400}+1j)", "must be literals"),
        (f"[{', '.join(['f()'] * 101)}]", "100 are made"),
        ("f(x=[{'y': -1000000000000000}])", "15 digits"),
        (f"f({'9' * 5000})", "cannot be read|digits"),
        (f"f({'(' * 51}", "50 deep"),
        (f"f({'-' * 9000}1)", "cannot be read|literals"),
        (f"f({'a+' * 6000}1)", "cannot be read|literals"),
        (f"f('{'x' * 16_384}')", "16384 are read"),
        ("<tool_call>{</tool_call>", "JSON"),
        ("<tool_call>[1]</tool_call>", "a call is an object"),
        ('<tool_call>{"name": "ls", "arguments": "a"}</tool_call>', "a call is an object"),
        ('<tool_call>{"name": "ls"}', "needs its"),
    ],
)
def test_what_cannot_be_read_is_said(message: str, said: str) -> None:
    with pytest.raises(WrongCall, match=said):
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
