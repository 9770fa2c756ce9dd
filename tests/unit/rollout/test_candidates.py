"""Candidates for turns and for trajectories: which of them goes on, what it took, and what it leaves alone."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from examples.selection_weight import best_of_ratio
from transformers import GenerationConfig, MixtralConfig, MixtralForCausalLM

from sorl_trl import AgentRollout
from sorl_trl.rollout import (
    BatchResponder,
    BestOfTrajectories,
    BestOfTurns,
    Collector,
    EnvironmentResponder,
    Generation,
    LockStepEngine,
    Reply,
    RolloutLimits,
    SlotEngine,
    TagProtocol,
    ToolBox,
    TurnEnd,
)
from sorl_trl.rollout.environment import RowTurn
from sorl_trl.rollout.routing import Routers
from sorl_trl.rollout.trajectories import laid_out_routes
from sorl_trl.search import SearchUnavailable
from sorl_trl.types import Action, ActionKind, StopReason, Trajectory, Turn
from tests.model_families import GQA, build
from tests.policies import acting_policy, acting_tokenizer

from .fakes import FakeSearch, check_rows, turn_of, word_tokenizer

LIMITS = RolloutLimits(max_turns=4, max_turn_tokens=4, max_observation_tokens=8)
GUESSES = acting_tokenizer(("guess",))
GUESS = TagProtocol(tools=("guess",), invalid_feedback="1")
POLICY = acting_policy(GUESSES).eval()
with torch.no_grad():  # mostly, it guesses
    POLICY.lm_head.weight[GUESSES.convert_tokens_to_ids(["<guess>", "</guess>"])] *= 1.3
SAMPLED = GenerationConfig(do_sample=True, temperature=1.0, top_k=0)
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
HOWS = {
    "greedy": lambda score: BestOfTurns(3, score),
    "beam": lambda score: BestOfTurns(3, score, width=2),
    "lookahead": lambda score: BestOfTurns(2, score, width=2, depth=2),
    "trajectories": lambda score: BestOfTrajectories(3, score),
}


class Remembers:
    """A game that replies with how many guesses it has heard."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def step(self, turn: Turn) -> Reply:
        self.heard.append(turn.action.content)
        return Reply(str(len(self.heard)))

    def measures(self) -> dict[str, float]:
        return {"heard": float(len(self.heard))}


def low(example: Any, turn: Turn, reply: Reply | None) -> float:
    """Guesses are good, low ones even more."""
    return {"1": 2.0, "2": 1.0}.get(turn.action.content, 0.0) if reply else -1.0


class Watched(SlotEngine):
    """Says how many tokens it has sampled, and how many slots are taken when it closes."""

    left, tokens = -1, 0

    def poll(self) -> list[tuple[int, Generation]]:
        ended = super().poll()
        self.tokens += sum(len(generation.token_ids) for _, generation in ended)
        return ended

    def close(self) -> None:
        self.left = len(self._table.placed())
        super().close()


def play(how: Any, factory: Any = Remembers, rows: int = 6) -> tuple[list[Trajectory], Collector, Watched]:
    torch.manual_seed(3)
    collector = Collector(GUESSES, EnvironmentResponder(factory), GUESS, LIMITS, rejoin_after=2, candidates=how)
    engine = Watched(POLICY, TurnEnd(GUESSES, GUESS.stop_strings, [1]), SAMPLED)
    engine.logprobs_at = 1.0
    trajectories = collector.collect([[3, 7 + row % 3, 5] for row in range(rows)], engine)
    check_rows(trajectories)
    return trajectories, collector, engine


def sampled(trajectories: Sequence[Trajectory]) -> list[Any]:
    return [
        [replace(each, scores=()) if isinstance(each, Turn) else each for each in t.segments] for t in trajectories
    ]


def guesses(trajectory: Trajectory) -> list[str]:
    """Those that the environment has heard: the last turn is not given to it, and neither are invalid ones."""
    asked = [each.action for each in trajectory.turns[: LIMITS.max_turns]]
    return [action.content for action in asked if action.kind is ActionKind.TOOL]


def test_a_single_candidate_is_the_plain_rollout_to_the_bit() -> None:
    plain, alone, _ = play(None)
    asked = sum(map(len, map(guesses, plain)))
    assert asked > 6 and "environment_steps" not in alone.time
    for how in (BestOfTurns(1, low), BestOfTurns(1, low, width=2), BestOfTrajectories(1, lambda *_: 0.0)):
        trajectories, collector, _ = play(how)
        assert sampled(trajectories) == sampled(plain)
        assert [each.stop_reason for each in trajectories] == [each.stop_reason for each in plain]
        assert collector.time["environment_steps"] * 6 == pytest.approx(asked)
        tokens = sum(len(turn.token_ids) for each in plain for turn in each.turns)
        assert collector.time["tokens_sampled"] * 6 == pytest.approx(tokens)


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_what_is_kept_has_its_own_environment_and_log_probabilities(how: Any) -> None:
    """Environments have heard what the trajectory contains, and nothing discarded; the engine has no row left."""
    steps: list[Turn] = []

    class Counted(Remembers):
        def step(self, turn: Turn) -> Reply:
            steps.append(turn)
            return super().step(turn)

    trajectories, collector, engine = play(how(low), Counted)
    environments = collector.responder.environments
    assert [each.heard for each in environments] == [guesses(each) for each in trajectories]
    assert len(trajectories) == len(environments) == 6
    measured = [collector.responder.measures(row)["heard"] for row in range(6)]
    assert measured == [len(each.heard) for each in environments]
    assert collector.time["environment_steps"] * 6 == pytest.approx(len(steps)) and len(steps) > sum(measured)
    assert collector.time["tokens_sampled"] * 6 == pytest.approx(engine.tokens)
    assert engine.left == 0
    for trajectory in trajectories:
        ids = [*trajectory.prompt_ids, *(token for each in trajectory.segments for token in each.token_ids)]
        with torch.no_grad():
            logps = POLICY(torch.tensor([ids])).logits[0].log_softmax(-1)
        place = len(trajectory.prompt_ids)
        for segment in trajectory.segments:
            if isinstance(segment, Turn):
                rescored = [logps[place + i - 1, token] for i, token in enumerate(segment.token_ids)]
                torch.testing.assert_close(torch.tensor(segment.logprobs), torch.stack(rescored), atol=1e-5, rtol=1e-5)
            place += len(segment.token_ids)


def test_what_is_kept_has_the_routes_of_one_plain_pass() -> None:
    """Copies are read anew, but only what no earlier turn covers is theirs."""
    policy = build(
        lambda: MixtralForCausalLM(
            MixtralConfig(**{**GQA, "vocab_size": len(GUESSES), "max_position_embeddings": 512}, **EXPERTS)
        )
    )
    engine = SlotEngine(policy, TurnEnd(GUESSES, GUESS.stop_strings, [1]), SAMPLED)
    engine.report_routes()
    how = BestOfTurns(3, lambda example, turn, reply: turn.token_ids[0], width=2, depth=1)
    collector = Collector(GUESSES, EnvironmentResponder(Remembers), GUESS, LIMITS, candidates=how)
    trajectories = collector.collect([[3, 7 + row, 5] for row in range(3)], engine)
    assert max(len(each.turns) for each in trajectories) > 2
    for each in trajectories:
        ids = [*each.prompt_ids, *(token for segment in each.segments for token in segment.token_ids)]
        with torch.no_grad(), Routers(policy).replayed() as experts:
            policy(torch.tensor([ids]))
        assert laid_out_routes(each, len(ids), (2, 2))[:-1].tolist() == experts()[:-1].tolist()


def test_candidates_share_what_the_engine_has_read() -> None:
    """The prompt once, and after each turn its last token and the observation, however many candidates there are."""
    (trajectory,), _, engine = play(BestOfTurns(4, low), rows=1)
    observed = [len(each.token_ids) for each in trajectory.observations]
    assert len(observed) == len(trajectory.turns) - 1 > 1
    assert engine.prefilled_tokens == len(trajectory.prompt_ids) + sum(1 + size for size in observed)


# -------------------------------------------------------------------------------------------------------------------
# The law of the choice
# -------------------------------------------------------------------------------------------------------------------


class Enumerated:
    """Gives the candidates of row r the digits of r, so that all rows together have each combination once."""

    def __init__(self, candidates: int) -> None:
        self.digits = [*product(range(4), repeat=candidates)]

    def generate(self, contexts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> list[Generation]:
        answers = [turn_of(f"<answer> {word} </answer>") for word in ("Paris", "France", "capital", "of")]
        rows = len(self.digits)
        return [answers[self.digits[i % rows][i // rows]] for i in range(len(contexts))]


@pytest.mark.parametrize("values", [(0, 1, 2, 3), (0, 1, 1, 2), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("candidates", [1, 2, 4])
def test_the_best_is_distributed_by_the_law_and_ties_change_nothing(candidates: int, values: Sequence[int]) -> None:
    """Each of four answers has a quarter under π. Every combination of candidates occurs once, so counts are exact."""
    of = dict(zip(("Paris", "France", "capital", "of"), values, strict=True))
    for how in (BestOfTurns, BestOfTrajectories):
        best = how(candidates, lambda example, turn, reply: of[turn.action.content])
        collector = Collector(word_tokenizer(), FakeSearch(), TagProtocol(), candidates=best)
        trajectories = collector.collect([(9,)] * 4**candidates, Enumerated(candidates))
        chosen = Counter(each.answer for each in trajectories)
        for word, value in of.items():
            shares = (sum(other <= value for other in values) / 4, sum(other < value for other in values) / 4)
            assert Fraction(chosen[word], 4**candidates) == Fraction(best_of_ratio(*shares, candidates)) / 4
        assert all(max(each.turns[0].scores) == each.turns[0].scores[0] == of[each.answer] for each in trajectories)
        assert {len(each.turns[0].scores) for each in trajectories} == {candidates}


# -------------------------------------------------------------------------------------------------------------------
# A tree in which the greedy choice is wrong
# -------------------------------------------------------------------------------------------------------------------

AFTER = {
    "": ["<search> Paris </search>", "<search> France </search>"],
    "Paris": ["<answer> of </answer>"],
    "France": ["<answer> capital </answer>"],
}
"""What the policy says next after it has read this, in turn."""
WORTH = {"Paris": 1.0, "France": 0.0, "of": 0.0, "capital": 5.0}


class Tree:
    def __init__(self) -> None:
        self.calls = Counter[str]()

    def generate(self, contexts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> list[Generation]:
        return [self._next(word_tokenizer().decode(list(context))) for context in contexts]

    def _next(self, read: str) -> Generation:
        place = next((name for name in ("Paris", "France") if f"<search> {name}" in read), "")
        self.calls[place] += 1
        return turn_of(AFTER[place][(self.calls[place] - 1) % len(AFTER[place])])


class Says:
    def step(self, turn: Turn) -> Reply:
        return Reply("found")


@pytest.mark.parametrize(
    ("how", "answer", "tokens", "scores"),
    [
        ({}, "of", 6 + 6, [(2.0, 0.0), (0.0, 0.0)]),
        ({"width": 2}, "capital", 6 + 12, [(), ()]),
        ({"depth": 1}, "capital", 6 + 6 + 6, [(10.0, 2.0), (10.0, 10.0)]),
        ({"depth": 3, "width": 2}, "capital", 6 + 6 + 12, [(), ()]),
    ],
    ids=["greedy", "beam", "lookahead", "both"],
)
def test_beams_and_looking_ahead_find_what_a_greedy_choice_does_not(
    how: dict[str, int], answer: str, tokens: int, scores: list[tuple[float, ...]]
) -> None:
    """Two candidates of three tokens each: two searches, two answers after each path, one after each search.

    A single path keeps the scores of each turn's candidates, without those of earlier turns.
    """
    of_turns = BestOfTurns(2, lambda example, turn, reply: WORTH[turn.action.content] * example["times"], **how)
    responder = EnvironmentResponder(Says)
    collector = Collector(word_tokenizer(), responder, TagProtocol(), candidates=of_turns)
    (trajectory,) = collector.collect([(11,)], Tree(), examples=[{"times": 2.0}])
    assert trajectory.answer == answer
    assert (collector.time["tokens_sampled"], collector.time["environment_steps"]) == (tokens, 2)
    assert [turn.scores for turn in trajectory.turns] == scores


def test_a_rank_whose_rows_have_ended_polls_on() -> None:
    """`any_active` is called before each poll, and a generator for each poll, with candidates as without."""
    asked: list[bool] = []
    tree = Tree()

    def any_active(active: bool) -> bool:
        asked.append(active)
        return len(asked) < 6

    engine = LockStepEngine(tree, polls_together=True)
    of_turns = BestOfTurns(2, lambda example, turn, reply: WORTH[turn.action.content])
    collector = Collector(word_tokenizer(), EnvironmentResponder(Says), TagProtocol(), candidates=of_turns)
    collector.collect([(11,)], engine, any_active)
    assert asked == [True, True, False, False, False, False]
    assert sum(tree.calls.values()) == 2 + 2 + 3, "candidates of two turns, and three dummies"


# -------------------------------------------------------------------------------------------------------------------
# Copies of environments
# -------------------------------------------------------------------------------------------------------------------


class Forks(Remembers):
    """Has something that cannot be copied, and defines how to do without."""

    forks = 0

    def __init__(self, heard: Sequence[str] = ()) -> None:
        super().__init__()
        self.heard, self.lock = [*heard], threading.Lock()

    def fork(self) -> Any:
        type(self).forks += 1
        return type(self)(self.heard)


class ForksLater(Forks):
    async def fork(self) -> Any:
        return super().fork()


@pytest.mark.parametrize("environment", [Forks, ForksLater])
def test_an_environment_may_say_how_it_is_copied(environment: Any) -> None:
    environment.forks = 0
    trajectories, collector, _ = play(BestOfTurns(3, low), environment)
    assert [each.heard for each in collector.responder.environments] == [guesses(each) for each in trajectories]
    assert sampled(trajectories) == sampled(play(BestOfTurns(3, low))[0])
    assert environment.forks == 2 * sum(len(each.turns) for each in trajectories)


class Locked(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class ForksNothing(Remembers):
    def fork(self) -> None: ...


class Stateful(BatchResponder):
    def respond(self, turns: Sequence[RowTurn]) -> Sequence[Reply]:
        return [Reply()] * len(turns)


def test_what_cannot_be_copied_or_compared_is_refused_in_one_error() -> None:
    with pytest.raises(TypeError, match="Locked needs a method `fork` for candidates: cannot pickle"):
        play(BestOfTurns(2, low), Locked)
    with pytest.raises(TypeError, match=r"ForksNothing.fork returned a NoneType, but must return a copy of it"):
        play(BestOfTurns(2, low), ForksNothing)
    collector = Collector(GUESSES, Stateful(1), GUESS, LIMITS, candidates=BestOfTurns(2, low))
    with pytest.raises(TypeError, match="Stateful has no method `branch`"):
        collector.collect([(3,)], SlotEngine(POLICY, TurnEnd(GUESSES, GUESS.stop_strings, [1]), SAMPLED))
    for score in (float("nan"), None, "good"):
        with pytest.raises(ValueError, match=f"`score` returned {score!r}, but must return a finite number"):
            play(BestOfTurns(2, lambda *_, score=score: score))
    with pytest.raises(TypeError, match="candidates is 4, but must be `BestOfTurns`, `BestOfTrajectories` or None"):
        AgentRollout(EnvironmentResponder(Remembers), candidates=4)
    with pytest.raises(TypeError, match="`score` is 'best', but must be a function"):
        BestOfTurns(4, "best")
    for wrong in (BestOfTurns, BestOfTrajectories, lambda width, score: BestOfTurns(2, score, width=width)):
        with pytest.raises(ValueError, match="is 0, but must be a whole number, at least 1"):
            wrong(0, low)


class DownFor(Remembers):
    """Is down for a 1, as a step or as a copy."""

    def step(self, turn: Turn) -> Reply:
        if turn.action.content == "1":
            raise SearchUnavailable("down")
        return super().step(turn)


class CopiesGoDown(Remembers):
    copies = 0

    def fork(self) -> Any:
        type(self).copies += 1
        if type(self).copies % 2:
            raise ConnectionError("down")
        copied = type(self)()
        copied.heard = [*self.heard]
        return copied


@pytest.mark.parametrize("environment", [DownFor, CopiesGoDown])
def test_a_candidate_whose_environment_is_down_comes_last(environment: Any) -> None:
    """Everything else has a worse score, were it asked for one."""
    of_turns = BestOfTurns(4, lambda example, turn, reply: -float(reply is not None))
    trajectories, collector, _ = play(of_turns, environment)
    reasons = Counter(each.stop_reason for each in trajectories)
    assert reasons[StopReason.ENVIRONMENT_UNAVAILABLE] <= 1
    for trajectory, each in zip(trajectories, collector.responder.environments, strict=True):
        if not trajectory.stop_reason.is_infrastructure_failure:
            assert each.heard == guesses(trajectory)
    everywhere, _, _ = play(BestOfTurns(2, low), lambda: AlwaysDown())
    assert {each.stop_reason for each in everywhere if guesses(each)} == {StopReason.ENVIRONMENT_UNAVAILABLE}


class AlwaysDown:
    def step(self, turn: Turn) -> Reply:
        raise SearchUnavailable("down")


class Hangs(Remembers):
    """Never answers a 1."""

    never = threading.Event()

    def step(self, turn: Turn) -> Reply:
        if turn.action.content == "1":
            self.never.wait()
        return super().step(turn)

    def __deepcopy__(self, memo: Any) -> Any:
        copied = Hangs()
        copied.heard = [*self.heard]
        return copied


def test_a_candidate_that_hangs_is_given_up_and_its_row_is_used_again() -> None:
    torch.manual_seed(0)
    responder = EnvironmentResponder(Hangs, timeout_s=0.2)
    collector = Collector(GUESSES, responder, GUESS, LIMITS, candidates=BestOfTurns(4, low))
    engine = SlotEngine(POLICY, TurnEnd(GUESSES, GUESS.stop_strings, [1]), SAMPLED)
    try:
        trajectories = collector.collect([(3, 7, 5), (3, 8, 5)], engine)
    finally:
        Hangs.never.set()
    for each, environment in zip(trajectories, responder.environments, strict=True):
        assert environment.heard == [guess for guess in guesses(each) if guess != "1"], "four may have said 1"
    assert sum(len(each.heard) for each in responder.environments) > 4


class Game:
    def reset(self, **_: Any) -> None:
        self.told: list[str] = []

    def tell(self, word: str) -> str:
        """
        Tell it.

        Args:
            word: What.
        """
        self.told.append(word)
        return word


def test_objects_of_tools_are_copied_and_functions_are_shared() -> None:
    told: list[str] = []

    def shout(word: str) -> str:
        """
        Shout it.

        Args:
            word: What.
        """
        told.append(word)
        return word

    box = ToolBox([shout], Game)
    box.open([{}, {}])
    box.branch(1, 3)
    for row, word in ((1, "one"), (3, "three")):
        calls = Action(ActionKind.MESSAGE, calls=(("tell", {"word": word}), ("shout", {"word": word})))  # type: ignore[arg-type]
        assert box.ask([RowTurn(row, Turn((1,), "", calls))])[0].result(60).results[0].text == word
    assert told == ["one", "three"]
    box.keep([0, 3])
    box.close()
    assert [each.told for each in box.environments] == [[], ["three"]]
    assert len(box.kinds) == 2
