from __future__ import annotations

import pytest

from sorl_trl.rollout.environments.function_calls import Call, WrongCall, read_calls

CALLS = [Call("cd", (), {"folder": "a"}), Call("ls", (), {"a": [1]})]


@pytest.mark.parametrize(
    "brackets", ["[{}]", "{}", "[{}", "{}]", "```python\n[{}]\n```", "<think>[pwd()]</think>\n{}"]
)
def test_brackets_may_be_missing_around_a_list(brackets: str) -> None:
    """The leaderboard adds them."""
    assert read_calls(brackets.format("cd(folder='a'), ls(a=[1])")) == CALLS


@pytest.mark.parametrize("said", ["[ls()] and more", "[ls(), 1]", "ls()[0]", "ls() + ls()", "[ls(), pwd("])
def test_what_is_more_than_calls_is_refused(said: str) -> None:
    with pytest.raises(WrongCall):
        read_calls(said)
