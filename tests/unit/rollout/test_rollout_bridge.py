"""From trajectories to what TRL's `rollout_func` returns, and from the trainer to the generator."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sorl_trl.rollout import EngineOptions
from sorl_trl.rollout.agent_rollout import SearchRollout
from sorl_trl.rollout.policy_rollout import policy_engine, rollout_output
from sorl_trl.rollout.trajectories import closed
from sorl_trl.search import NoSearch
from sorl_trl.trainers.returned import read_output
from sorl_trl.types import Action, ActionKind, Observation, StopReason, Trajectory, Turn
from tests.agents import LIMITS, VOCABULARY, build_agent
from tests.policies import build_moe_policy, build_policy
from tests.unit.evaluation.trajectories import TWO_AGENTS

EOS = 1


def output_of(trajectories: list[Trajectory], window: int | None = None) -> dict[str, Any]:
    return rollout_output(closed(trajectories, EOS, window))


def turn(*ids: int, with_logprobs: bool = True) -> Turn:
    """Token 7 has the log-probability -0.7."""
    return Turn(ids, "", Action(ActionKind.INVALID), tuple(-i / 10 for i in ids) if with_logprobs else None)


def trajectory(*segments: Turn | Observation, stop_reason: StopReason = StopReason.ANSWERED) -> Trajectory:
    return Trajectory((2, 3), segments, stop_reason)


def searched(stop_reason: StopReason) -> Trajectory:
    return trajectory(turn(5, 6), Observation((7, 8), ""), turn(9), stop_reason=stop_reason)


def row(output: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(output[key][0] for key in ("completion_ids", "env_mask", "turn_ids", "logprobs"))


@pytest.mark.parametrize(
    ("stop_reason", "trained", "ends"),
    [
        (StopReason.ANSWERED, True, True),
        (StopReason.MAX_TURNS, True, True),
        (StopReason.TRAJECTORY_LIMIT, True, False),
        (StopReason.SEARCH_UNAVAILABLE, False, True),
    ],
)
def test_a_complete_trajectory_ends_in_an_eos_that_is_not_trained_on(
    stop_reason: StopReason, trained: bool, ends: bool
) -> None:
    """An infrastructure failure keeps its tokens, and none is trained on."""
    expected = (
        [5, 6, 7, 8, 9, EOS],
        [1, 1, 0, 0, 1, 0] if trained else [0] * 6,
        [0, 0, -1, -1, 1, -1] if trained else [-1] * 6,
        [-0.5, -0.6, 0.0, 0.0, -0.9, 0.0],
    )
    output = output_of([searched(stop_reason)])
    assert row(output) == tuple(each[: 5 + ends] for each in expected)
    assert row(output_of([trajectory(turn(5, EOS))]))[0] == [5, EOS], "the policy's own is not doubled"


def test_one_turn_without_logprobs_leaves_all_without() -> None:
    """TRL takes them for the whole batch or not at all."""
    partly = trajectory(turn(5), Observation((7,), ""), turn(6, with_logprobs=False))
    output = output_of([trajectory(turn(5)), partly])
    assert output["logprobs"] is None
    assert output["completion_ids"] == [[5, EOS], [5, 7, 6, EOS]]


def test_of_several_contexts_the_last_one_ends_and_each_has_a_window_of_its_own() -> None:
    """Context 0 has 7 tokens with the prompt; until the searcher's last turn, context 1 has 6."""
    searching = replace(TWO_AGENTS, segments=TWO_AGENTS.segments[:-2])
    output = output_of([TWO_AGENTS, searching], window=8)
    assert [ids[-2:] for ids in output["completion_ids"]] == [[13, EOS], [12, EOS]]
    assert [contexts[-2:] for contexts in output["context_ids"]] == [[0, 0], [1, 1]]
    assert [each.segments[-1].context for each in read_output(output, 2)] == [0, 1]
    for trajectory, size in ((TWO_AGENTS, 7), (searching, 6)):
        ends = [output_of([trajectory], window)["completion_ids"][0][-1] for window in (size, size + 1)]
        assert (ends[0] != EOS, ends[1] == EOS) == (True, True)
    assert "context_ids" not in output_of([searched(StopReason.ANSWERED)])


def test_nothing_is_known_of_the_routes_of_what_no_engine_has_read() -> None:
    """The end that is appended, and a prompt that is cut because it was too long to be read."""
    known = turn(5, 6)
    known = replace(known, routes=np.array([[[0, 1]], [[2, 3]], [[4, 5]]], dtype=np.int16))
    unread = Trajectory((2, 3, 4, 5), (), StopReason.CONTEXT_LIMIT)
    output = output_of([trajectory(known), unread])
    assert [len(ids) for ids in (*output["prompt_ids"], *output["completion_ids"])] == [2, 2, 3, 1]
    routes, of_unread = (each.tolist() for each in output["routes"])
    assert routes == [[[0, 1]], [[2, 3]], [[4, 5]], [[-1, -1]], [[-1, -1]]]
    assert of_unread == [[[-1, -1]]] * 3
    assert "routes" not in output_of([trajectory(turn(5))])


def test_a_rollout_is_the_same_through_trls_lists(tmp_path: Path) -> None:
    """As when a user's function calls it: tensors, metrics and what reward functions get."""
    batches, metrics, shown = [], [], []
    for is_wrapped in (False, True):
        seen: list[Any] = []
        folder = tmp_path / str(is_wrapped)
        folder.mkdir()
        torch.manual_seed(0)
        trainer = build_agent(folder, reward_funcs=[partial(noted_reward, seen)], mask_truncated_completions=True)
        if is_wrapped:
            trainer.rollout_func = lambda prompts, of, rollout=trainer.rollout_func: rollout(prompts, of)
        torch.manual_seed(3)
        trainer.model.eval()
        rows = [{"prompt": prompt, "golden_answers": ["oslo"]} for prompt in ("where rome", "where") * 4]
        batches.append(trainer._generate_and_score_completions(rows))
        metrics.append(
            {k: v for k, v in trainer._metrics["eval"].items() if "seconds" not in k and "per_second" not in k}
        )
        shown.append(seen)
    assert batches[0].keys() == batches[1].keys() and metrics[0] == metrics[1] and shown[0] == shown[1]
    assert all(torch.equal(batches[1][name], value) for name, value in batches[0].items())


def noted_reward(seen: list[Any], **columns: Any) -> list[float]:
    seen.append({name: value for name, value in columns.items() if isinstance(value, list)})
    return [float(len(each.turns)) for each in columns["trajectory"]]


def test_routes_come_with_rollouts(tmp_path: Path) -> None:
    """Also in evaluation, as which a dry run rehearses."""
    trainer = build_agent(tmp_path, model=build_moe_policy(vocab_size=len(VOCABULARY)))
    trainer.args.router_replay = "r3"
    trainer.model.train()
    rollout, prompts = trainer.rollout_func, ["where rome", "where"]
    output = rollout(prompts, trainer)
    for i, made in enumerate(output["trajectory"]):
        read = len(made.prompt_ids) + sum(len(each.token_ids) for each in made.segments)
        routes = output["routes"][i]
        assert routes.shape == (len(output["prompt_ids"][i]) + len(output["completion_ids"][i]), 1, 2)
        assert (routes >= 0).all((1, 2)).tolist() == [place < read - 1 for place in range(len(routes))]
    trainer.model.eval()
    assert "routes" in rollout(prompts, trainer)


def test_an_engine_without_routes_is_refused_where_replay_asks_for_them(tmp_path: Path) -> None:
    dense, mixture = build_policy(), build_moe_policy()
    for model, kind, reason in (
        (dense, "slots", "has no router"),
        (mixture, "lockstep", "`rollout_engine='slots'`"),
    ):
        rollout = SearchRollout(NoSearch(), limits=LIMITS, engine=EngineOptions(rollout_engine=kind))
        trainer = build_agent(tmp_path, NoSearch(), model=model, rollout_func=rollout)
        trainer.args.router_replay = "r3"
        trainer.model.train()
        with pytest.raises(ValueError, match=reason):
            rollout(["where"], trainer)


def test_a_rollout_that_fails_leaves_the_policy_as_it_was(tmp_path: Path) -> None:
    """TRL's context switches gradient checkpointing off, and does not expect an exception."""
    trainer = build_agent(tmp_path, gradient_checkpointing=True)
    trainer.model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="no index"), policy_engine(trainer, [], EngineOptions()):
        assert not trainer.model.is_gradient_checkpointing
        raise ValueError("no index")
    assert trainer.model.is_gradient_checkpointing


def test_images_are_refused(tmp_path: Path) -> None:
    """TRL would train on images that the policy never saw."""
    trainer = build_agent(tmp_path)
    text, image = {"type": "text", "text": "where"}, {"type": "image", "image": object()}
    prompts = [[{"role": "user", "content": content}] for content in ("where", [text, image])]
    with pytest.raises(ValueError, match="`SearchRollout` supports only text"):
        SearchRollout(NoSearch(), limits=LIMITS)(prompts, trainer)


@pytest.mark.parametrize("prompts", [["where rome", "where"], [[{"role": "user", "content": "where"}]] * 2])
def test_prompts_are_encoded_as_trl_encodes_them(tmp_path: Path, prompts: Any) -> None:
    trainer = build_agent(tmp_path, chat_template_kwargs={"before": "oslo"})
    trainer.processing_class.chat_template = "{{ before }} {% for m in messages %}{{ m.content }} {% endfor %}"
    encoded = trainer.rollout_func.setup(trainer).encode(prompts)
    assert encoded == trainer._tokenize_prompts(prompts)[0]
    assert trainer.processing_class.decode(encoded[0]).startswith("oslo") == (prompts[0] != "where rome")
