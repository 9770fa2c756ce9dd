"""The world with working: its expert, the length of its turns, and what its actions depend on."""

from __future__ import annotations

import functools
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from benchmarks.worlds.clerk import NO_WORKING_NOISE, VERBOSITIES, Clerk, WorkingNoise, pair_of, words
from benchmarks.worlds.dated import YEARS, Entry, build_dated, current
from benchmarks.worlds.working import WorkingWorld

from sorl_trl import qa
from sorl_trl.rollout import Collector, RolloutLimits, assemble
from sorl_trl.sandbox import CORPUS_FILE, PROMPT_TEMPLATE, PROTOCOL, World, WorldSize, train_tokenizer
from sorl_trl.sandbox.expert import UNKNOWN
from sorl_trl.search import BM25Index
from sorl_trl.types import Trajectory

HOPS = 3
NAMES = {"person": 60, "company": 12, "city": 12, "land": 6}
Ask = Callable[[int, WorkingNoise], list[Trajectory]]


@pytest.fixture(scope="module")
def world() -> World:
    return build_dated(1, HOPS, WorldSize(80, 20), NAMES)


@pytest.fixture(scope="module")
def tokenizer(world: World):
    return train_tokenizer([world], words())


@pytest.fixture(scope="module")
def ask(world: World, tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """The clerk's trajectories on all train questions, at a verbosity and with some noise."""
    folder = world.write(tmp_path_factory.mktemp("world"))
    index = BM25Index.build(folder / CORPUS_FILE, folder / "index", show_progress=False)
    prompts = tokenizer([PROMPT_TEMPLATE.format(question=question.question) for question in world.train])["input_ids"]

    @functools.cache
    def asked(verbosity: int, noise: WorkingNoise) -> list[Trajectory]:
        limits = WorkingWorld("", "", verbosity, HOPS).limits
        clerk = Clerk(verbosity, tokenizer, world.relations, world.train, noise, 0)
        return Collector(tokenizer, index, PROTOCOL, limits).collect(prompts, clerk)

    return asked


def rights(trajectories: Sequence[Trajectory], world: World) -> list[float]:
    return [
        qa.score_exact_match(*pair) for pair in zip(trajectories, (q.golden_answers for q in world.train), strict=True)
    ]


def turn_lengths(trajectories: Sequence[Trajectory]) -> list[int]:
    counts = (Counter(turn for turn in row.turn_ids if turn >= 0) for row in assemble(trajectories))
    return [length for count in counts for length in count.values()]


def completions(trajectories: Sequence[Trajectory], tokenizer) -> list[str]:
    return tokenizer.batch_decode([row.completion_ids for row in assemble(trajectories)])


@pytest.mark.parametrize("verbosity", VERBOSITIES)
class TestAtEveryVerbosity:
    def test_the_expert_without_noise_is_right(self, ask: Ask, world: World, verbosity: int) -> None:
        assert statistics.fmean(rights(ask(verbosity, NO_WORKING_NOISE), world)) >= 0.99

    def test_turns_are_about_as_long_as_promised(self, ask: Ask, verbosity: int) -> None:
        lengths = turn_lengths(ask(verbosity, NO_WORKING_NOISE))
        assert 0.8 * verbosity <= statistics.fmean(lengths) <= 1.2 * verbosity
        assert len(lengths) == (HOPS + 1) * 80

    def test_every_word_is_known(self, ask: Ask, tokenizer, verbosity: int) -> None:
        assert not [t for t in completions(ask(verbosity, WorkingNoise()), tokenizer) if tokenizer.unk_token in t]

    def test_the_same_decisions_are_taken(self, ask: Ask, tokenizer, verbosity: int) -> None:
        """The same searches, passages and answers as in few words, mistakes included."""
        actions = re.compile(r"<(?:search|information|answer)>.*?</")
        here, bare = (completions(ask(each, WorkingNoise()), tokenizer) for each in (verbosity, 4))
        assert list(map(actions.findall, here)) == list(map(actions.findall, bare))


class TestMistakes:
    def test_they_cost_the_reward(self, ask: Ask, world: World) -> None:
        for mistakes in ({"wrong_entry": 1.0}, {"wrong_keyword": 1.0}, {"early_answer": 1.0}):
            noise = WorkingNoise(**({"wrong_keyword": 0.0, "early_answer": 0.0, "wrong_entry": 0.0} | mistakes))
            assert statistics.fmean(rights(ask(10, noise), world)) < 0.2

    @pytest.mark.parametrize("verbosity", [each for each in VERBOSITIES if each > 4])
    def test_the_action_follows_from_the_working(self, ask: Ask, world: World, tokenizer, verbosity: int) -> None:
        keywords = {relation.noun: relation.keyword for relation in world.relations}
        for text in completions(ask(verbosity, WorkingNoise(wrong_keyword=0.4, wrong_entry=0.4)), tokenizer):
            searches = re.findall(r"so (?:former |latter )?(\w+) , next (\w+) : <search> (.+?) </search>", text)
            assert [f"{name} {keywords[noun]}" for name, noun, _ in searches] == [query for *_, query in searches]
            assert len(searches) == text.count("<search>")
            assert re.search(r"so \w+ (\w+) , done : <answer> \1 </answer>", text)

    @pytest.mark.parametrize("verbosity", VERBOSITIES)
    def test_a_word_says_which_entry_was_taken(self, ask: Ask, tokenizer, verbosity: int) -> None:
        for text in completions(ask(verbosity, WorkingNoise(wrong_entry=0.5)), tokenizer):
            turns = re.findall(r"<information>(.*?)</information>(.*?)</(?:search|answer)>", text)
            assert turns
            for passage, turn in turns:
                *_, word = re.findall(r"former|latter", turn)
                name = pair_of(passage)[word == "latter"].name
                assert re.search(rf"<\w+> {name} ", turn)

    def test_a_wrong_comparison_is_written_down(self, ask: Ask, tokenizer) -> None:
        noise = WorkingNoise(wrong_keyword=0.0, early_answer=0.0, wrong_entry=1.0)
        for text in completions(ask(20, noise), tokenizer):
            found = re.findall(r"of (\d+) \w+ and (\d+) \w+ later is (\w+)", text)
            assert len(found) == HOPS
            assert all((word == "former") == (int(first) < int(second)) for first, second, word in found)

    @pytest.mark.parametrize("hops", [2, 3, 4])
    def test_they_spoil_as_many_trajectories_whatever_the_hops(self, hops: int) -> None:
        noise = WorkingWorld("", "", 40, hops).warm_start.noise
        assert isinstance(noise, WorkingNoise)
        faultless = ((1 - noise.wrong_keyword) * (1 - noise.wrong_entry)) ** hops
        assert faultless * (1 - noise.early_answer) ** (hops - 1) == pytest.approx(0.9**3 * 0.88**3 * 0.96**2, 1e-3)

    def test_half_queries_are_refused(self) -> None:
        with pytest.raises(ValueError, match="must be 0"):
            WorkingNoise(half_name=0.1)

    def test_an_unknown_verbosity_is_refused(self, world: World, tokenizer) -> None:
        with pytest.raises(ValueError, match="verbosity=5"):
            Clerk(5, tokenizer, world.relations, world.train, NO_WORKING_NOISE, 0)


class TestDatedWorlds:
    def test_train_and_evaluation_questions_are_disjoint(self, world: World) -> None:
        texts = [question.question for question in (*world.train, *world.evaluation)]
        assert len(set(texts)) == len(texts) == 100

    def test_answers_follow_from_the_passages(self, world: World) -> None:
        relations = {relation.name: relation for relation in world.relations}
        facts = {" ".join(passage.text.split()[:2]): pair_of(passage.text) for passage in world.passages}
        for question in world.evaluation:
            name = question.metadata["subject"]
            for relation in question.metadata["relations"]:
                name = current(facts[f"{name} {relations[relation].keyword}"]).name
            assert question.golden_answers == (name,)

    def test_hops_change_the_questions_and_not_the_facts(self, world: World) -> None:
        other = build_dated(1, 2, WorldSize(80, 20), NAMES)
        assert other.passages == world.passages
        assert {question.metadata["hops"] for question in other.train} == {2}

    def test_seeds_share_names_and_no_facts(self, world: World) -> None:
        other = build_dated(2, HOPS, WorldSize(80, 20), NAMES)
        assert not {passage.text for passage in other.passages} & {passage.text for passage in world.passages}

    def test_the_later_entry_is_current(self) -> None:
        pair = pair_of("karo works 12 zel , 3 mor .")
        assert pair == (Entry(12, "zel"), Entry(3, "mor"))
        assert current(pair) == Entry(12, "zel")
        assert {entry.name for entry in pair_of("nothing")} == {UNKNOWN}
        assert min(YEARS) > 0  # an unknown entry is of the year 0

    def test_one_hop_is_refused(self) -> None:
        with pytest.raises(ValueError, match="hops=1"):
            build_dated(1, 1, WorldSize(8, 2))


class TestWorlds:
    def test_worlds_of_other_data_have_other_names(self) -> None:
        shapes = [(10, 3), (20, 3), (20, 2)]
        names = {WorkingWorld("", "", *shape).name for shape in shapes}
        others = ({"seeds_per_policy": 2}, {"evaluation_questions": 10})
        assert len(names | {WorkingWorld("", "", 10, 3, **other).name for other in others}) == 5

    def test_seeds_share_a_policy_where_it_says_so(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from benchmarks.worlds import working

        asked: list[int] = []
        monkeypatch.setattr(working, "TRAIN_QUESTIONS", 4)
        monkeypatch.setattr(working, "PRACTICE_WORLDS", 1)
        monkeypatch.setattr(
            working, "warm_start", lambda world, practice, cache, config: asked.append(config.seed) or cache
        )
        shared = WorkingWorld("", "", seeds_per_policy=4)
        for seed in (201, 204, 205):
            shared.build(seed, tmp_path / str(seed), tmp_path)
        assert asked == [50, 50, 51]

    def test_limits_hold_the_longest_trajectory(self, ask: Ask) -> None:
        for verbosity in VERBOSITIES:
            limits: RolloutLimits = WorkingWorld("", "", verbosity, HOPS).limits
            trajectories = ask(verbosity, WorkingNoise())
            assert max(turn_lengths(trajectories)) < limits.max_turn_tokens
            assert max(len(row.completion_ids) for row in assemble(trajectories)) < limits.max_trajectory_tokens
