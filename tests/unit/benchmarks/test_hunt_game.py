"""The hunts of the stability benchmark: rules by hand, the hunter, the fields, and hunts in token ids."""

from __future__ import annotations

import pytest
from benchmarks.worlds.hunt_game import Field, Hunt, Hunter, HunterNoise, HuntRules, make_fields, vocabulary
from benchmarks.worlds.hunt_rollout import found_reward, play

from sorl_trl.sandbox import word_tokenizer

FIELD = Field("abc", columns=7, rows=5, column=6, row=2)


def hunt(turns: int = 8, field: Field = FIELD) -> Hunt:
    return Hunt(field, HuntRules(turns=turns))


def answers(game: Hunt, *turns: str) -> list[str]:
    return [game.answer(turn) for turn in turns]


def test_a_hunt_by_hand() -> None:
    game = hunt()
    digs = [(4, 3), (4, 1), (4, 2), (7, 2), (6, 2)]
    read = answers(game, *(f"dig at column {column} row {row}" for column, row in digs))
    assert read == ["go north", "go south", "go east", "go west", "found"]
    assert (game.found, game.over, game.turns) == (True, True, 5)


def test_the_turns_run_out() -> None:
    game = hunt(turns=2)
    assert answers(game, "dig at column 1 row 1", "dig at column 2 row 2") == ["go south", "lost"]
    assert (game.found, game.over) == (False, True)


@pytest.mark.parametrize("turn", ["", "dig at column 6 row", "dig at column 6 row 2 2", "dig at column 8 row 2"])
def test_nonsense_is_answered_and_costs_a_turn(turn: str) -> None:
    game = hunt(turns=2)
    assert answers(game, turn, turn) == ["no such place", "lost"]
    assert (game.west, game.east, game.north, game.south) == (1, 7, 1, 5)


def test_without_mistakes_the_hunter_finds_every_treasure() -> None:
    hunter = Hunter(HunterNoise(walk=0.0, stray=0.0, slip=0.0), 0)
    for field in make_fields(HuntRules(), seed=1, unseen=300, practice=0).unseen:
        game = hunt(field=field)
        while not game.over:
            game.answer(hunter.turn(game))
        assert game.found, field


def test_fields_that_judge_are_apart() -> None:
    fields = make_fields(HuntRules(shortest=5, longest=9), seed=3, unseen=200, practice=2000)
    assert (len(fields.train), len(fields.unseen), len(fields.practice)) == (1025, 200, 2000)
    together = [*fields.train, *fields.unseen, *fields.practice]
    assert len({field.name for field in together}) == len(together)
    train, unseen, practice = (
        {(each.columns, each.rows, each.column, each.row) for each in kind}
        for kind in (fields.train, fields.unseen, fields.practice)
    )
    assert not unseen & (train | practice)


def test_a_turn_without_an_end_is_nonsense() -> None:
    rules = HuntRules(turns=2)
    tokenizer = word_tokenizer(vocabulary(rules))
    endless = tokenizer.encode("dig dig dig", add_special_tokens=False)
    well = [*tokenizer.encode("dig at column 6 row 2", add_special_tokens=False), tokenizer.eos_token_id]
    games = [Hunt(FIELD, rules), Hunt(FIELD, rules)]
    first, second = play(games, tokenizer, lambda active, *_: [well if number else endless for number in active])
    assert tokenizer.decode(first.completion_ids) == "dig dig dig no such place dig dig dig lost [EOS]"
    assert first.env_mask == [1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0]
    assert tokenizer.decode(second.completion_ids) == "dig at column 6 row 2 [EOS] found [EOS]"
    assert second.env_mask == [1] * 7 + [0, 0]
    assert found_reward(found=[game.found for game in games]) == [0.0, 1.0]
