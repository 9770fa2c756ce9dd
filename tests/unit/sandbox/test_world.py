from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sorl_trl.qa import Question
from sorl_trl.sandbox import World, WorldSize, build_atlas
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


def texts(world: World) -> set[str]:
    return {passage.text for passage in world.passages}


def words(world: World) -> set[str]:
    return {word for text in texts(world) for word in text.split()}


def test_it_states_thousands_of_real_facts(atlas: World):
    assert len(atlas.passages) > 3000
    assert {
        "Marseille lies inside France .",
        "Paris stands near 49 N .",
        "France is governed from Paris .",
        "Japan pays with JPY .",
        "Brazil belongs to South America .",
        "Portugal borders Spain .",
        "Italy is dialled by 39 .",
    } <= texts(atlas)


def test_the_same_seed_gives_the_same_atlas_and_another_one_other_questions(atlas: World):
    assert build_atlas(0) == atlas
    other = build_atlas(1)
    assert texts(other) == texts(atlas)
    assert other.train != atlas.train


def test_evaluation_questions_are_unseen_and_hard_to_guess(atlas: World):
    assert not {question.question for question in atlas.train} & {question.question for question in atlas.evaluation}
    assert {question.metadata["hops"] for question in atlas.evaluation} == {1, 2}
    assert atlas.guess_rate() < 0.1
    assert not any("continent" in question.question for question in (*atlas.train, *atlas.evaluation))


def test_the_shuffled_atlas_has_the_same_words_and_other_facts(atlas: World):
    shuffled = build_atlas(0, shuffled=True)
    assert words(shuffled) == words(atlas)
    assert len(shuffled.passages) == len(atlas.passages)
    # Some facts survive by chance: many countries pay with the euro.
    assert len(texts(shuffled) & texts(atlas)) < 0.1 * len(atlas.passages)


def test_the_plain_atlas_says_the_same_in_english():
    plain = build_atlas(0, WorldSize(300, 10), plain=True)
    assert {
        "Marseille is a city in the country of France.",
        "The capital of France is Paris.",
        "The calling code of Italy is 39.",
        "One neighbour of Portugal is Spain.",
    } <= texts(plain)
    assert all(question.question.startswith("What is the ") for question in plain.train)
