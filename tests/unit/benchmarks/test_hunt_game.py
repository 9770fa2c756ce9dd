"""The hunts of the stability benchmark: rules by hand, the hunter, the fields, and hunts in token ids."""

from __future__ import annotations

from itertools import groupby

import pytest
from benchmarks.worlds.hunt import watch
from benchmarks.worlds.hunt_game import Field, Hunt, Hunter, HunterNoise, HuntRules, make_fields, vocabulary
from benchmarks.worlds.hunt_rollout import found_reward, play

from sorl_trl.sandbox import word_tokenizer

FIELD = Field("abc", columns=7, rows=5, column=6, row=2)
NO_NOISE = HunterNoise(walk=0.0, stray=0.0, slip=0.0)
RULES = HuntRules(shortest=5, longest=9)
"""Of the fields of most tests."""


def hunt(turns: int = 8, field: Field = FIELD, notes: bool = False) -> Hunt:
    return Hunt(field, HuntRules(turns=turns, notes=notes))


def answers(game: Hunt, *turns: str) -> list[str]:
    return [game.answer(turn) for turn in turns]


class TestRules:
    def test_a_hunt_by_hand(self) -> None:
        game = hunt()
        digs = [(4, 3), (4, 1), (4, 2), (7, 2), (6, 2)]
        read = answers(game, *(f"dig at column {column} row {row}" for column, row in digs))
        assert read == ["go north", "go south", "go east", "go west", "found"]
        assert (game.found, game.over, game.turns) == (True, True, 5)

    def test_what_is_left(self) -> None:
        game = hunt()
        answers(game, "dig at column 1 row 4")
        assert (game.west, game.east, game.north, game.south) == (1, 7, 1, 3)
        answers(game, "dig at column 4 row 2")
        assert (game.west, game.east, game.north, game.south) == (5, 7, 2, 2)
        answers(game, "dig at column 7 row 2", "dig at column 1 row 5")  # the second tells nothing new
        assert (game.west, game.east, game.north, game.south) == (5, 6, 2, 2)

    def test_the_turns_run_out(self) -> None:
        game = hunt(turns=2)
        assert answers(game, "dig at column 1 row 1", "dig at column 2 row 2") == ["go south", "lost"]
        assert (game.found, game.over) == (False, True)

    def test_the_last_turn_may_find(self) -> None:
        game = hunt(turns=1)
        assert answers(game, "dig at column 6 row 2") == ["found"]
        assert game.found

    @pytest.mark.parametrize(
        "turn",
        [
            "",
            "dig at column 6 row",
            "dig dig at column 6 row 2",
            "dig at column 6 row 2 2",
            "dig at row 2 column 6",
            "dig at column 8 row 2",
            "dig at column 6 row 6",
            "dig at column 0 row 2",
            "columns 1 to 7 rows 1 to 5 dig at column 6 row 2",
            "[PAD] [EOS] go found",
        ],
    )
    def test_nonsense_is_answered_and_costs_a_turn(self, turn: str) -> None:
        game = hunt(turns=2)
        assert answers(game, turn, turn) == ["no such place", "lost"]
        assert (game.found, game.turns) == (False, 2)
        assert (game.west, game.east, game.north, game.south) == (1, 7, 1, 5)

    def test_notes_are_demanded_where_they_are_in_the_rules(self) -> None:
        game = hunt(notes=True)
        said = answers(game, "dig at column 6 row 2", "columns 1 to 7 rows 1 to 5 dig at column 6 row 2")
        assert said == ["no such place", "found"]

    def test_there_is_no_turn_after_the_end(self) -> None:
        game = hunt(turns=1)
        game.answer("dig at column 6 row 2")
        with pytest.raises(RuntimeError, match="after 1 turns"):
            game.answer("dig at column 6 row 2")

    def test_sides_out_of_order(self) -> None:
        with pytest.raises(ValueError, match="`longest` is 3, but must be at least `shortest`, 5"):
            HuntRules(shortest=5, longest=3)


class TestHunter:
    @pytest.mark.parametrize("notes", [False, True])
    def test_without_mistakes_it_finds_every_treasure(self, notes: bool) -> None:
        fields = make_fields(HuntRules(), seed=1, unseen=1000, practice=0)
        hunter = Hunter(NO_NOISE, 0)
        for field in fields.unseen:
            game = hunt(turns=HuntRules().turns, field=field, notes=notes)
            while not game.over:
                game.answer(hunter.turn(game))
            assert game.found, field

    def test_walking_goes_a_step_at_a_time(self) -> None:
        game, hunter = hunt(), Hunter(HunterNoise(1.0, 0.0, 0.0), 0)
        turns = []
        while not game.over:
            turns.append(hunter.turn(game))
            game.answer(turns[-1])
        places = [(4, 3), (4, 2), (5, 2), (6, 2)]  # half-way at first, for there is nowhere to walk from
        assert turns == [f"dig at column {column} row {row}" for column, row in places]

    def test_each_other_mistake(self) -> None:
        strays = {Hunter(HunterNoise(0.0, 1.0, 0.0), seed).turn(hunt()) for seed in range(500)}
        assert strays == {f"dig at column {column} row {row}" for column in range(1, 8) for row in range(1, 6)}
        assert {Hunter(HunterNoise(0.0, 0.0, 1.0), seed).turn(hunt()) for seed in range(100)} == {
            "at column 4 row 3",
            "dig column 4 row 3",
            "dig at 4 row 3",
            "dig at column row 3",
            "dig at column 4 3",
            "dig at column 4 row",
        }


class TestFields:
    def test_those_that_judge_are_apart(self) -> None:
        fields = make_fields(RULES, seed=3, unseen=200, practice=2000)
        assert (len(fields.train), len(fields.unseen), len(fields.practice)) == (1025, 200, 2000)
        together = [*fields.train, *fields.unseen, *fields.practice]
        assert len({field.name for field in together}) == len(together)
        layouts = [
            {(each.columns, each.rows, each.column, each.row) for each in kind}
            for kind in (fields.train, fields.unseen, fields.practice)
        ]
        assert not layouts[1] & (layouts[0] | layouts[2])
        assert all(5 <= each.columns <= 9 and 1 <= each.column <= each.columns for each in together)
        assert all(5 <= each.rows <= 9 and 1 <= each.row <= each.rows for each in together)

    def test_the_seed_decides(self) -> None:
        first, again, other = (make_fields(RULES, seed, 10, 10) for seed in (1, 1, 2))
        assert first == again
        assert first.unseen != other.unseen

    @pytest.mark.parametrize(("unseen", "practice"), [(1225, 0), (10, 17576 - 1224)])
    def test_more_than_there_are(self, unseen: int, practice: int) -> None:
        with pytest.raises(ValueError, match=r"below the 1225 possible fields.*practice=.* at most 16351"):
            make_fields(RULES, 1, unseen, practice)


class TestPlay:
    @pytest.mark.parametrize("notes", [False, True])
    def test_in_token_ids(self, notes: bool) -> None:
        rules = HuntRules(notes=notes)
        tokenizer = word_tokenizer(vocabulary(rules))
        fields = make_fields(rules, seed=1, unseen=1, practice=20).practice
        for example in watch(fields, rules, NO_NOISE, tokenizer, seed=0):
            assert tokenizer.unk_token_id not in example.input_ids
            runs = [(of_policy, list(run)) for of_policy, run in groupby(example.labels, lambda label: label != -100)]
            assert [of_policy for of_policy, _ in runs[1::2]] == [True] * (len(runs) // 2)
            for _, turn in runs[1::2]:
                assert len(turn) == rules.turn_tokens
                assert turn[-1] == tokenizer.eos_token_id
            assert tokenizer.decode(example.input_ids).endswith(" found [EOS]")

    def test_a_turn_without_an_end_and_one_of_many_are_nonsense(self) -> None:
        rules = HuntRules(turns=2)
        tokenizer = word_tokenizer(vocabulary(rules))
        end = tokenizer.eos_token_id
        endless = tokenizer.encode("dig dig dig", add_special_tokens=False)
        games = [Hunt(FIELD, rules), Hunt(FIELD, rules)]
        asked = []

        def write(active: list[int], hunts: list[Hunt], contexts: list[list[int]]) -> list[list[int]]:
            asked.append((active, [tokenizer.decode(ids) for ids in contexts]))
            well = tokenizer.encode("dig at column 6 row 2", add_special_tokens=False)
            return [[*well, end] if number else endless for number in active]

        first, second = play(games, tokenizer, write)
        prompt = "field a b c has 7 columns 5 rows"
        assert asked == [([0, 1], [prompt] * 2), ([0], [f"{prompt} dig dig dig no such place"])]
        assert tokenizer.decode(first.completion_ids) == "dig dig dig no such place dig dig dig lost [EOS]"
        assert first.env_mask == [1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0]
        assert tokenizer.decode(second.completion_ids) == "dig at column 6 row 2 [EOS] found [EOS]"
        assert second.env_mask == [1] * 7 + [0, 0]
        assert found_reward(found=[game.found for game in games]) == [0.0, 1.0]
