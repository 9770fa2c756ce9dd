from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sorl_trl.trainers.sampled import check_rollout, checked_rollout, sampled_rows


def output(**overrides: Any) -> dict[str, Any]:
    return {
        "prompt_ids": [[4], [4, 5]],
        "completion_ids": [[4, 5, 6], [7]],
        "logprobs": None,
        "env_mask": [[1, 0, 1], [1]],
        "turn_ids": [[0, -1, 1], [0]],
        **overrides,
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"completion_ids": [[4, 5, 6]]}, "1 rows of `completion_ids` for 2 prompts"),
        ({"prompt_ids": [[4]]}, "1 rows of `prompt_ids` for 2 prompts"),
        ({"env_mask": [[1, 0, 1]]}, "1 rows of `env_mask` for 2 prompts"),
        ({"seen": [3]}, "1 rows of `seen` for 2 prompts"),
        ({"env_mask": [[1, 0], [1]]}, "2 entries of `env_mask` in row 0, whose completion has 3 tokens"),
        ({"turn_ids": [[0, -1, 1], [0, 0]]}, "2 entries of `turn_ids` in row 1, whose completion has 1 tokens"),
        ({"logprobs": [[0.0, 0.0, 0.0], []]}, "0 entries of `logprobs` in row 1"),
        ({"completion_ids": [[4, 5, 6], []]}, "empty completion in row 1"),
        ({"env_mask": [[1, 2, 1], [1]]}, r"`env_mask` holds \[2\] in row 0"),
        ({"turn_ids": [[0, -1, 1], [1]]}, r"turn_ids\[1, 0\] is 1, but must be 0 \(row 1 of turn_ids: \[1, -1, -1\]"),
    ],
)
def test_bad_rollouts_are_named(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rollout(output(**overrides), 2)


def test_turn_ids_imply_the_mask() -> None:
    rollout = checked_rollout(lambda prompts, trainer: {k: v for k, v in output().items() if k != "env_mask"})
    assert rollout(["a", "b"], None)["env_mask"] == [[1, 0, 1], [1]]


def test_what_a_rollout_leaves_out_is_as_good_as_none() -> None:
    """TRL wants the key `logprobs`, and takes `None` for it alone."""
    rollout = checked_rollout(lambda prompts, trainer: {**output(env_mask=None, turn_ids=None), "logprobs": None})
    assert rollout(["a", "b"], None) == {
        "logprobs": None,
        **{k: output()[k] for k in ("prompt_ids", "completion_ids")},
    }


def test_masks_and_turn_ids_may_be_tensors() -> None:
    rows = {key: [torch.tensor(row) for row in output()[key]] for key in ("env_mask", "turn_ids")}
    assert checked_rollout(lambda prompts, trainer: output(**rows))(["a", "b"], None) == output()


@pytest.mark.parametrize("key", ["turn_ids", "env_mask"])
@pytest.mark.parametrize(
    "row", [["a", "b", "c"], "abc", ["0", "1", "0"], [0, None, 1], [0, 0.5, 1], [0, math.inf, 1], 3, [[0], [1], [1]]]
)
def test_what_is_no_integer_is_refused_with_the_name_of_its_field(key: str, row: Any) -> None:
    rollout = checked_rollout(lambda prompts, trainer: output(**{key: [row, [0]]}))
    with pytest.raises(ValueError, match=rf"`{key}` is .* in row 0, but must hold an integer for each token"):
        rollout(["a", "b"], None)


def test_recorded_turns_win_over_runs_of_the_mask() -> None:
    ids, mask, recorded = [[4, 5, 6]], [[1, 1, 1]], [[0, 1, 1]]
    assert turns(ids, mask, recorded) == recorded
    assert turns(ids, [[1, 0, 1]], None) == [[0, -1, 1]]
    assert turns(ids, None, None) == [[0, 0, 0]]


def turns(ids: Any, mask: Any, recorded: Any, contexts: Any = None, window: int | None = None) -> list[Any]:
    rows = sampled_rows([[3]] * len(ids), ids, mask, recorded, contexts, window)
    return [list(row.turn_ids) for row in rows]


def test_tools_that_lengthen_recorded_turns_are_refused() -> None:
    with pytest.raises(ValueError, match="turn_ids"):
        turns([[4, 5, 6]], [[1, 0, 1]], [[0, -1]])


CONTEXTS = {"env_mask": [[1, 0, 1], [1]], "turn_ids": None, "context_ids": [[0, -1, 1], [0]]}


def test_a_turn_ends_where_its_context_does() -> None:
    """A sub-agent is asked, and the main context goes on at once."""
    mask, contexts = [[1, 0, 1, 1, 0, 1]], [[0, -1, 1, 0, -2, 2]]
    assert turns([[4] * 6], mask, None, contexts) == [[0, -1, 1, 2, -1, 3]]


def test_contexts_may_be_tensors() -> None:
    rows = [torch.tensor(row) for row in CONTEXTS["context_ids"] or []]
    given = {**CONTEXTS, "context_ids": rows, "turn_ids": [[0, -1, 1], [0]]}
    assert checked_rollout(lambda prompts, trainer: output(**given))(["a", "b"], None)["context_ids"] == [
        [0, -1, 1],
        [0],
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"context_ids": [[0, -1, 1]]}, "1 rows of `context_ids` for 2 prompts"),
        ({"context_ids": [[0, 1], [0]]}, "2 entries of `context_ids` in row 0"),
        ({"context_ids": [[0, 1, 2], [0]]}, "2 at token 2 of row 0, which is the first of its context"),
        ({"context_ids": [[0, 1, -1], [0]]}, "-1 at token 2 of row 0, which repeats another context"),
        ({"context_ids": [[0, 1, 1], [1]]}, "1 at token 0 of row 1, which is the first of its context"),
        ({"context_ids": [[0, 1, 0.5], [0]]}, "must hold an integer for each token: the number of its context"),
        (
            {"env_mask": [[1, 0, 1], [1]], "turn_ids": [[0, -1, 0], [0]]},
            "`context_ids` are 0 and 1 within turn 0 of row 0",
        ),
    ],
)
def test_bad_contexts_are_named(overrides: dict[str, Any], message: str) -> None:
    rollout = checked_rollout(lambda prompts, trainer: output(**{**CONTEXTS, **overrides}))
    with pytest.raises(ValueError, match=message):
        rollout(["a", "b"], None)


def test_a_context_longer_than_the_policy_reads_is_named() -> None:
    ids, mask, contexts = [[4, 5, 6, 7]], [[1, 0, 0, 1]], [[0, -1, 1, 1]]
    assert turns(ids, mask, None, contexts, window=3) == [[0, -1, -1, 1]]
    with pytest.raises(ValueError, match="context 1 of row 0 has 3 tokens, but the policy reads at most 2"):
        turns(ids, mask, None, contexts, window=2)
