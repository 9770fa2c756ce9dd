"""What a rollout function returned: checks, turns, states; and what ranks gather, and which rows train together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sorl_trl import EndpointRollout
from sorl_trl.trainers.batch import micro_batches
from sorl_trl.trainers.returned import check_callable, read_output
from sorl_trl.trainers.rewards import state_keys
from sorl_trl.types import Trajectory

# ---------------------------------------------------------------------------------------------------------------------
# What a rollout function returns
# ---------------------------------------------------------------------------------------------------------------------


def output(**overrides: Any) -> dict[str, Any]:
    return {
        "prompt_ids": [[4], [4, 5]],
        "completion_ids": [[4, 5, 6], [7]],
        "logprobs": None,
        "env_mask": [[1, 0, 1], [1]],
        "turn_ids": [[0, -1, 1], [0]],
        **overrides,
    }


def checked(**overrides: Any) -> list[Trajectory]:
    return read_output(output(**overrides), 2)


CONTEXTS = {"turn_ids": None, "context_ids": [[0, -1, 1], [0]]}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"completion_ids": [[4, 5, 6]]}, "1 rows of `completion_ids` for 2 prompts"),
        ({"seen": [3]}, "1 rows of `seen` for 2 prompts"),
        ({"turn_ids": [[0, -1, 1], [0, 0]]}, "2 entries of `turn_ids` in row 1"),
        ({"completion_ids": [[4, 5, 6], []]}, "empty completion in row 1"),
        ({"turn_ids": [[0, -1, 1], [1]]}, r"turn_ids\[1, 0\] is 1"),
        ({**CONTEXTS, "context_ids": [[0, 1, 2], [0]]}, "`context_ids` is 2 at token 2 of row 0"),  # its first
        ({**CONTEXTS, "context_ids": [[0, 1, -1], [0]]}, "`context_ids` is -1 at token 2 of row 0"),  # a repetition
        *(
            ({"agents": [bad, ["p"]]}, "`agents` is .* in row 0, .* for each of the row's 2 turns")
            for bad in (["p"], "pq", ["p", 3], 7)
        ),
        ({"agents": 7}, "`agents` is 7 in row 0"),
    ],
)
def test_bad_rollouts_are_named(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked(**overrides)


@pytest.mark.parametrize("key", ["turn_ids", "context_ids"])
@pytest.mark.parametrize("row", ["abc", [0, None, 1], [0, 0.5, 1], 3, [[0], [1]]])
def test_what_is_no_integer_is_refused_with_the_name_of_its_field(key: str, row: Any) -> None:
    for odd in (row, [0, math.inf, 1]):
        with pytest.raises(ValueError, match=f"`{key}` is .* in row 0"):
            checked(**{key: [odd, [0]]})


def test_what_a_rollout_may_leave_out_or_return_as_tensors() -> None:
    """TRL wants the key `logprobs`, and takes `None` for it alone. Turn ids imply the mask."""
    assert checked(env_mask=None) == checked()
    bare = checked(env_mask=None, turn_ids=None)
    assert [each.turn_ids for each in bare] == [[0, 0, 0], [0]]
    rows = {**output(logprobs=[[-1.0, 0.0, None], [-2.0]]), "context_ids": [[0, -1, 1], [0]]}
    names = ("completion_ids", "env_mask", "turn_ids", "context_ids")
    found, same = (
        read_output({**rows, **each}, 2) for each in ({}, {n: [*map(torch.tensor, rows[n])] for n in names})
    )
    first, second = found
    assert [each.prompt_ids for each in found] == [(4,), (4, 5)]
    assert {name: [getattr(each, name) for each in (first, second)] for name in names} == {n: rows[n] for n in names}
    assert second.logprobs == [-2.0] and first.logprobs[:2] == [-1.0, 0.0] and math.isnan(first.logprobs[2])
    assert [each.segments[:1] for each in same] == [each.segments[:1] for each in found]
    with pytest.raises(ValueError, match=r"must return keys \['logprobs'\]"):
        read_output({key: rows[key] for key in ("prompt_ids", "completion_ids")}, 2)


def test_other_fields_are_columns_and_agents_name_turns() -> None:
    found = checked(agents=[["a", "b"], None], seen=[3, 4], both="x")
    columns = [{"agents": ["a", "b"], "seen": 3, "both": "x"}, {"agents": None, "seen": 4, "both": "x"}]
    assert [each.columns for each in found] == columns and [each.agents for each in found] == [["a", "b"], [""]]


def turns(ids: Any, mask: Any, recorded: Any, contexts: Any = None) -> list[Any]:
    rows = {"prompt_ids": [[3]] * len(ids), "completion_ids": ids, "logprobs": None}
    found = read_output({**rows, "env_mask": mask, "turn_ids": recorded, "context_ids": contexts}, len(ids))
    return [each.turn_ids for each in found]


def test_turns_are_recorded_or_runs_of_the_mask() -> None:
    """A run also ends where its context does: a sub-agent is asked, and the main context goes on at once."""
    ids, recorded = [[4, 5, 6]], [[0, 1, 1]]
    assert turns(ids, [[1, 1, 1]], recorded) == recorded
    assert turns(ids, [[1, 0, 1]], None) == [[0, -1, 1]]
    assert turns(ids, [[1, 0, 1]], [[0, -1, 0]]) == [[0, -1, 0]], "interrupted"
    assert turns(ids, None, None) == [[0, 0, 0]]
    assert turns([[4] * 6], [[1, 0, 1, 1, 0, 1]], None, [[0, -1, 1, 0, -2, 2]]) == [[0, -1, 1, 2, -1, 3]]
    with pytest.raises(ValueError, match="turn_ids"):
        turns(ids, [[1, 0, 1]], [[0, -1]])  # tools have lengthened it


# ---------------------------------------------------------------------------------------------------------------------
# States
# ---------------------------------------------------------------------------------------------------------------------


def keys(*rows: tuple[list[int], ...]) -> list[list[int]]:
    """Of trajectories of prompt, completion, turn ids and, where there are several, context ids."""
    names = ("prompt_ids", "completion_ids", "turn_ids", "context_ids")
    columns = zip(*((*row, [0] * len(row[1]))[:4] for row in rows), strict=True)
    made = read_output({"logprobs": None, **dict(zip(names, map(list, columns), strict=True))}, len(rows))
    return state_keys(made, max(len(each.spans) for each in made)).tolist()


def test_a_state_is_the_last_observation() -> None:
    """Whatever the policy had written before, and however long ago the observation was the first."""
    first = ([5], [7, 20, 21, 8], [0, -1, -1, 1])
    later = ([5], [9, 9, 20, 22, 9, 20, 21, 8], [0, 0, -1, -1, 1, -1, -1, 2])
    (_, of_first, _), (_, other, of_later) = keys(first, later)
    assert of_first == of_later != other


def test_the_first_turn_starts_in_the_prompt() -> None:
    """With the environment's text before it, and it is not an observation of the same tokens."""
    [[one], [same], [greeted], [other]] = keys(
        ([5, 6], [7], [0]), ([5, 6], [8], [0]), ([5, 6], [20, 8], [-1, 0]), ([6, 5], [7], [0])
    )
    assert one == same
    assert len({one, greeted, other}) == 3
    [[prompt, observation]] = keys(([20], [7, 20, 8], [0, -1, 1]))
    assert prompt != observation


def test_what_a_context_repeats_is_no_observation() -> None:
    """The same state, whether the history is read again, without a thought, or goes on."""
    plain = ([5], [7, 20, 8], [0, -1, 1])
    afresh = ([5], [7, 5, 20, 8], [0, -1, -1, 1], [0, -1, 1, 1])
    (_, of_plain), (_, of_afresh) = keys(plain, afresh)
    assert of_plain == of_afresh
    again = ([5], [7, 5, 7, 8], [0, -1, -1, 1], [0, -1, -1, 1])  # nothing new: its state is all that it read
    assert keys(again)[0][1] == keys(([5, 7], [8], [0]))[0][0]


def test_keys_are_int64_and_the_same_in_every_process() -> None:
    many = [row[0] for row in keys(*(([i], [7], [0]) for i in range(200)))]
    assert len(set(many)) == 200
    assert min(many) >= 0 and max(many) > 2**61
    assert keys(([5], [7], [0])) == [[5850268771259085613]], "of another process"
    assert state_keys([checked(turn_ids=[[-1] * 3, [0]], env_mask=None)[0]] * 2, 0).shape == (2, 0)
    assert keys(([5], [20], [-1]), ([5], [7], [0]))[0] == [0], "without a turn"


# ---------------------------------------------------------------------------------------------------------------------
# Several processes, and micro-batches
# ---------------------------------------------------------------------------------------------------------------------


LENGTHS = [9, 8, 7, 6, 1, 2, 3, 4]
SHORT, LONG = [[5], [6]] * 4, [[5] * 9, [6] * 9] * 4
IN_ORDER = [[0, 1], [2, 3], [4, 5], [6, 7]]


def rows(prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """The rows of each micro-batch, of completions with so many tokens."""
    batch = {
        "prompt_ids": torch.tensor(prompts),
        "prompt_mask": torch.ones(len(prompts), len(prompts[0]), dtype=torch.long),
        "completion_mask": torch.tensor([[1] * length + [0] * (max(LENGTHS) - length) for length in LENGTHS]),
        "row": [*range(len(LENGTHS))],
        "num_items_in_batch": torch.tensor(sum(LENGTHS)),
        "pixel_values": None,
    }
    split = micro_batches(batch, **{"count": 4, "per_step": 1, "shares": False, "processes": 1, **options})
    for each in split:
        assert each["pixel_values"] is None and each["num_items_in_batch"] == sum(LENGTHS)
        assert each["completion_mask"].sum(1).tolist() == [LENGTHS[row] for row in each["row"]]
    return [each["row"] for each in split]


@pytest.mark.parametrize(
    ("prompts", "options", "expected"),
    [
        (SHORT, {}, IN_ORDER),
        (SHORT, {"processes": 2}, [[0, 4], [1, 5], [2, 6], [3, 7]]),  # of 10 tokens each
        (LONG, {"per_step": 2, "shares": True}, [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (LONG, {"per_step": 1, "shares": True}, IN_ORDER),
        (LONG, {"per_step": 2}, IN_ORDER),
        (SHORT, {"per_step": 2, "shares": True}, IN_ORDER),
    ],
)
def test_which_rows_share_a_micro_batch(prompts: Any, options: dict[str, Any], expected: list[list[int]]) -> None:
    """In their order; with several processes, as full as they can be; those of one prompt if an update gains by it."""
    assert rows(prompts, **options) == expected


async def agent(example: Any, endpoint: Any) -> float:
    return 1.0


@pytest.mark.parametrize("given", [agent, EndpointRollout])
def test_an_agent_is_no_rollout_function(given: Any) -> None:
    with pytest.raises(TypeError, match=r"`rollout_func` is the .*EndpointRollout\(agent\)"):
        check_callable(given)
