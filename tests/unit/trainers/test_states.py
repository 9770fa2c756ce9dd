from __future__ import annotations

from sorl_trl.trainers.sampled import Sampled, state_keys


def trajectory(
    prompt: list[int], completion: list[int], turns: list[int], contexts: list[int] | None = None
) -> Sampled:
    return Sampled(prompt, completion, turns, contexts or [0] * len(completion))


def keys(*rows: tuple[list[int], ...]) -> list[list[int]]:
    """Of trajectories of prompt, completion, turn ids and, where there are several, context ids."""
    made = [trajectory(*row) for row in rows]
    return state_keys(made, max(len(row.turns) for row in made)).tolist()


def turn_spans(turns: list[int]) -> list[tuple[int, int]]:
    return trajectory([5], [7] * len(turns), turns).turns


def test_spans_of_turns() -> None:
    assert turn_spans([-1, 0, 0, -1, 1, 2, -1]) == [(1, 3), (4, 5), (5, 6)]
    assert turn_spans([0, -1, 0, 1]) == [(0, 3), (3, 4)]  # interrupted by a token of the environment's
    assert turn_spans([-1, -1]) == []


def test_a_state_is_the_last_observation() -> None:
    """Whatever the policy had said before, and however long ago the observation was the first."""
    first = ([5], [7, 20, 21, 8], [0, -1, -1, 1])
    later = ([5], [9, 9, 20, 22, 9, 20, 21, 8], [0, 0, -1, -1, 1, -1, -1, 2])
    (_, of_first, _), (_, other, of_later) = keys(first, later)
    assert of_first == of_later != other


def test_the_first_turn_starts_in_the_prompt() -> None:
    """With what the environment has said before it, and it is no observation of the same tokens."""
    [[one], [same], [greeted], [other]] = keys(
        ([5, 6], [7], [0]), ([5, 6], [8], [0]), ([5, 6], [20, 8], [-1, 0]), ([6, 5], [7], [0])
    )
    assert one == same
    assert len({one, greeted, other}) == 3
    [[prompt, observation]] = keys(([20], [7, 20, 8], [0, -1, 1]))
    assert prompt != observation


def test_a_turn_that_follows_another_at_once_has_read_nothing_new() -> None:
    """Or all turns that tags split off would be in one state: that of no observation."""
    [[_, one], [_, other], [_, same]] = keys(([5], [7, 8], [0, 1]), ([5], [9, 8], [0, 1]), ([5], [7, 9], [0, 1]))
    assert one != other
    assert one == same


def test_keys_are_the_same_in_every_process() -> None:
    """And fit into int64."""
    many = [row[0] for row in keys(*(([i], [7], [0]) for i in range(200)))]
    assert len(set(many)) == 200
    assert min(many) >= 0
    assert max(many) > 2**61
    assert keys(([5], [7], [0])) == [[EXPECTED]]


EXPECTED = 5850268771259085613
"""Of another process."""


def test_without_a_turn() -> None:
    assert state_keys([trajectory([5], [1] * 3, [-1] * 3)] * 2, 0).shape == (2, 0)
    assert keys(([5], [20], [-1]), ([5], [7], [0]))[0] == [0]


def test_what_a_context_repeats_is_no_observation() -> None:
    """The same state, whether the history is read again, without a thought, or goes on."""
    plain = ([5], [7, 20, 8], [0, -1, 1])
    afresh = ([5], [7, 5, 20, 8], [0, -1, -1, 1], [0, -1, 1, 1])
    (_, of_plain), (_, of_afresh) = keys(plain, afresh)
    assert of_plain == of_afresh
    again = ([5], [7, 5, 7, 8], [0, -1, -1, 1], [0, -1, -1, 1])  # nothing new: its state is all that it read
    whole = ([5, 7], [8], [0])
    assert keys(again)[0][1] == keys(whole)[0][0]


def test_what_the_policy_read_before_a_turn() -> None:
    """Contexts may alternate: a sub-agent is asked, then the first one goes on."""
    row = trajectory([5, 6], [7, 30, 31, 8, 20, 9], [0, -1, -1, 1, -1, 2], [0, -1, 1, 1, 0, 0])
    assert [row.read_before(start) for start, _ in row.turns] == [[5, 6], [30, 31], [5, 6, 7, 20]]
