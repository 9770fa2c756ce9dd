from __future__ import annotations

from sorl_trl.sandbox import World, build_atlas


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
