from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sorl_trl.qa import Question
from sorl_trl.sandbox import World, WorldSize
from sorl_trl.sandbox.world import build_world

from .helpers import HOME, RIVER

FACTS = {
    "home": {"Ann": ("Ulm",), "Bob": ("Ulm",), "Cy": ("Ulm", "Bonn")},
    "river": {"Ulm": ("Danube", "Iller"), "Bonn": ("Rhine",)},
}
ALL = WorldSize(train_questions=5, evaluation_questions=2, hop_shares=(5 / 7, 2 / 7))


def questions_of(world: World) -> set[tuple[str, tuple[str, ...]]]:
    return {(question.question, question.golden_answers) for question in (*world.train, *world.evaluation)}


def test_passages_state_every_fact_once_under_the_subject_s_name():
    world = build_world("toy", [HOME, RIVER], FACTS, 0, ALL)
    assert sorted((passage.title, passage.text) for passage in world.passages) == [
        ("Ann", "Ann was born in Ulm ."),
        ("Bob", "Bob was born in Ulm ."),
        ("Bonn", "Bonn drinks from Rhine ."),
        ("Cy", "Cy was born in Bonn ."),
        ("Cy", "Cy was born in Ulm ."),
        ("Ulm", "Ulm drinks from Danube ."),
        ("Ulm", "Ulm drinks from Iller ."),
    ]
    assert len({passage.id for passage in world.passages}) == 7


def test_questions_follow_one_or_two_relations_and_never_an_ambiguous_middle():
    world = build_world("toy", [HOME, RIVER], FACTS, 0, ALL)
    assert questions_of(world) == {
        ("what is the hometown of Ann ?", ("Ulm",)),
        ("what is the hometown of Bob ?", ("Ulm",)),
        ("what is the hometown of Cy ?", ("Ulm", "Bonn")),
        ("what is the water of Ulm ?", ("Danube", "Iller")),
        ("what is the water of Bonn ?", ("Rhine",)),
        ("what is the water of the hometown of Ann ?", ("Danube", "Iller")),
        ("what is the water of the hometown of Bob ?", ("Danube", "Iller")),
    }


@given(seed=st.integers(), train=st.integers(1, 4), held_out=st.integers(1, 3))
def test_splits_are_disjoint_deterministic_and_of_the_size_asked_for(seed, train, held_out):
    size = WorldSize(train, held_out, hop_shares=(0.75, 0.25))
    world = build_world("toy", [HOME, RIVER], FACTS, seed, size)
    assert world == build_world("toy", [HOME, RIVER], FACTS, seed, size)
    assert (len(world.train), len(world.evaluation)) == (train, held_out)
    assert len(questions_of(world)) == train + held_out


def test_guess_rate_is_that_of_the_most_frequent_train_answer_of_the_same_relations():
    def question(relation: str, *answers: str) -> Question:
        return Question("", "", answers, {"relations": [relation]})

    train = (question("home", "Ulm"), question("home", "Ulm"), question("home", "Bonn"), question("river", "Rhine"))
    evaluation = (question("home", "Ulm"), question("home", "Bonn"), question("river", "Iller", "Rhine"))
    world = World("toy", (), (), train, (*evaluation, question("unseen", "Ulm")))
    assert world.guess_rate() == 2 / 4
