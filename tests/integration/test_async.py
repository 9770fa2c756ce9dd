"""Rollouts that are sampled while the ones before are trained on."""

from __future__ import annotations

import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.quickstart import PROTOCOL
from peft import LoraConfig
from torch import Tensor
from transformers import TrainerCallback

from sorl_trl import SearchRollout, SOGRPOTrainer, SOPPOTrainer
from sorl_trl.command_line import UserMistake
from sorl_trl.rollout import EngineOptions
from sorl_trl.rollout.engines.vllm import EngineUnavailable
from sorl_trl.search import NoSearch
from sorl_trl.trainers.checkpoint import Continuation
from sorl_trl.trainers.checks import check_ahead
from sorl_trl.trainers.late_rollouts import PolicyCopies, RolloutsAhead
from tests.agents import (
    LIMITS,
    Slow,
    agent_policy,
    build_agent,
    logged,
    native_agent,
    questions,
    search_index,
    steps_after,
)
from tests.training import IN_FLOAT64

REUSED: dict[str, Any] = {"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 1}
"""Four updates of each rollout; a pass over the eight prompts has four rollouts."""


def build(
    folder: Path, trainer_class: Any = SOGRPOTrainer, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Any:
    folder.mkdir(exist_ok=True)
    arguments = {**REUSED, "max_steps": 24, "async_staleness": 2}
    if trainer_class is SOPPOTrainer:
        arguments |= {"num_generations": 1, "critic_warmup_steps": 0}
    torch.manual_seed(0)
    search = Slow(search_index(folder), 0.02)
    trainer = build_agent(folder, search, trainer_class, model=agent_policy().to(dtype), **{**arguments, **overrides})
    trainer.asked = []
    sample = trainer._sample

    def noted(rows: list[Any]) -> Any:
        samples, scored = sample(rows)
        if trainer.model.training:
            completions = [each.trajectory.completion_ids for each in samples]
            trainer.asked.append(([row["prompt"] for row in rows], completions))
        return samples, scored

    trainer._sample = noted
    return trainer


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("sorl-ahead")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trainer that has trained on six rollouts, with two evaluations in between."""
    evaluation = {"eval_strategy": "steps", "eval_steps": 12, "eval_dataset": questions(4)}
    trainer = build(tmp_path_factory.mktemp("whole"), **evaluation)
    trainer.train()
    assert not threads()
    return trainer


def asked(trainer: Any) -> list[list[Any]]:
    """The prompts of each rollout that was trained on."""
    return [prompts for prompts, _ in trainer.asked]


def test_without_staleness_it_is_synchronous_training(tmp_path: Path) -> None:
    ahead, plain = (build(tmp_path / name, async_staleness=0, max_steps=8) for name in ("ahead", "plain"))
    torch.manual_seed(1)
    plain.train()
    torch.manual_seed(1)
    ahead._ahead = RolloutsAhead(ahead._host, ahead.rollout_func, 0)
    ahead.add_callback(Continuation(ahead._ahead))
    ahead.train()
    assert ahead.asked == plain.asked and len(plain.asked) == 2
    named = dict(plain.model.named_parameters())
    assert all(torch.equal(value, named[name]) for name, value in ahead.model.named_parameters())
    ours, theirs = (steps_after(0, each.state.log_history) for each in (ahead, plain))
    assert [{k: v for k, v in log.items() if "async" not in k and "sampling" not in k} for log in ours] == theirs


def test_what_is_trained_on_is_as_late_as_allowed_and_nothing_is_dropped(whole: Any, tmp_path: Path) -> None:
    assert logged(whole, "async/age_max") == [0, 1, 2, 2, 2, 2]
    plain = build(tmp_path, async_staleness=0)
    plain.train()
    assert asked(whole) == asked(plain)


def test_evaluation_asks_the_policy_as_it_is(whole: Any) -> None:
    assert len(logged(whole, "eval_reward")) == 2
    assert not any(name.startswith("eval_async") for log in whole.state.log_history for name in log)


def test_groups_that_are_completed_first_are_trained_on_first(tmp_path: Path) -> None:
    """The first search ends once two batches have been trained on."""
    trainer = build(tmp_path, async_order="completed", per_device_train_batch_size=8)
    search, calls = trainer.rollout_func.search, count()
    two_taken, in_time = threading.Event(), list[bool]()

    def straggle(queries: Any, k: int) -> Any:
        if next(calls) == 0:
            in_time.append(two_taken.wait(60))
        return search.search.search_batch(queries, k)

    search.search_batch = straggle
    rewarded: list[tuple[str, str]] = []
    reward = trainer.reward_funcs[0]

    def noted(*, prompts: Any, golden_answers: Any, **columns: Any) -> Any:
        rewarded.extend(zip(prompts, (each[0] for each in golden_answers), strict=True))
        if len(rewarded) >= 2 * len(prompts):
            two_taken.set()
        return reward(prompts=prompts, golden_answers=golden_answers, **columns)

    noted.__name__ = "noted"
    trainer.reward_funcs[0] = noted
    trainer.train()
    assert in_time == [True]
    assert max(logged(trainer, "async/age_max")) <= 6
    assert rewarded and all(prompt == f"where {answer}" for prompt, answer in rewarded), "rows keep their columns"


@pytest.mark.parametrize(
    ("trainer_class", "options"),
    [
        (SOPPOTrainer, {}),
        (SOGRPOTrainer, {"peft_config": LoraConfig(r=2, target_modules="all-linear")}),
        (SOGRPOTrainer, {"temperature": 1.5, "top_p": 0.8, "top_k": 10, "min_p": 0.05}),
    ],
)
def test_a_policy_that_stands_still_is_the_one_that_sampled(
    tmp_path: Path, trainer_class: Any, options: dict[str, Any]
) -> None:
    """However it chooses among the tokens that it finds likely."""
    trainer = build(tmp_path, trainer_class, learning_rate=0.0, max_steps=8, **options)
    trainer.train()
    ratios = [*logged(trainer, "turns/ratio_min"), *logged(trainer, "turns/ratio_max")]
    assert ratios == pytest.approx([1.0] * 16, abs=1e-5)


def test_a_late_rollout_is_compared_with_the_policy_that_sampled_it(tmp_path: Path) -> None:
    """Each batch of the log-ratio that it starts from: 0 with the weights of then, and not with those of now."""
    trainer = build(tmp_path, learning_rate=1e-2, num_iterations=1, steps_per_generation=1, max_steps=5)
    weights: list[dict[str, Tensor]] = []
    differences: list[list[float]] = []
    compute, other = trainer._compute_loss, agent_policy()

    @torch.no_grad()
    def difference(at: dict[str, Tensor], inputs: Any) -> float:
        other.load_state_dict(at)
        ids, mask = (
            torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], 1) for name in ("ids", "mask")
        )
        targets = inputs["completion_ids"]
        scores = other(ids, attention_mask=mask).logits[:, -targets.size(1) - 1 : -1].log_softmax(-1)
        logps = scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return float((logps - inputs["old_per_token_logps"])[inputs["turn_ids"] >= 0].abs().max())

    def compute_loss(model: Any, inputs: Any) -> Tensor:
        weights.append({name: value.detach().clone() for name, value in trainer.model.state_dict().items()})
        differences.append([difference(at, inputs) for at in weights])
        return compute(model, inputs)

    trainer._compute_loss = compute_loss
    trainer.train()
    for batch, by_version in enumerate(differences):
        sampled_by = max(batch - 2, 0)
        assert by_version[sampled_by] < 1e-5
        assert all(each > 1e-3 for version, each in enumerate(by_version) if version != sampled_by)


class Stop(TrainerCallback):  # type: ignore[misc]
    """Raises at a step."""

    def __init__(self, step: int, error: BaseException) -> None:
        self.step, self.error = step, error

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise self.error


def saved_at(folder: Path, step: int, **options: Any) -> Path:
    """The checkpoint of a run that is interrupted soon after."""
    first = build(folder, save_strategy="steps", save_steps=step, **options)
    first.add_callback(Stop(step + 1, RuntimeError("power")))
    with pytest.raises(RuntimeError, match="power"):
        first.train()
    return folder / f"checkpoint-{step}"


@pytest.mark.parametrize(("step", "trainer_class"), [(5, SOGRPOTrainer), (8, SOPPOTrainer)])
def test_a_resumed_run_continues_with_the_rollouts_in_progress(tmp_path: Path, step: int, trainer_class: Any) -> None:
    """In the middle of a rollout's updates, and after them."""
    options: dict[str, Any] = {"trainer_class": trainer_class, "max_steps": 16, "dtype": torch.float64}
    options["adam_epsilon"] = IN_FLOAT64["adam_epsilon"]
    whole, rest = (build(tmp_path / name, **options) for name in ("whole", "rest"))
    whole.train()
    rest.train(resume_from_checkpoint=str(saved_at(tmp_path / "first", step, **options)))
    begun = -(-step // 4)
    assert rest.asked == whole.asked[begun:]
    assert logged(rest, "async/age_max")[-(4 - begun) :] == [2] * (4 - begun)
    for (name, ours), (_, theirs) in zip(rest.model.named_parameters(), whole.model.named_parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6, msg=name)


def test_rollouts_of_other_settings_are_sampled_anew(
    whole: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rest = build(tmp_path / "rest", async_staleness=1)
    rest.train(resume_from_checkpoint=str(saved_at(tmp_path / "first", 8)))
    assert "rollouts in progress are sampled anew" in caplog.text
    assert asked(rest) == asked(whole)[2:]
    assert max(logged(rest, "async/age_max")[2:]) == 1


ACROSS = {"num_iterations": 3, "steps_per_generation": 1, "gradient_accumulation_steps": 2}
"""The optimizer's second step begins with one rollout and ends with the next."""


@pytest.mark.parametrize(
    ("before", "changed"),
    [
        ({}, {"num_iterations": 1}),
        ({"async_staleness": 0, **ACROSS}, ACROSS),
    ],
    ids=["fewer iterations", "synchronous, steps across rollouts"],
)
def test_a_run_resumes_where_a_synchronous_one_does(
    tmp_path: Path, before: dict[str, Any], changed: dict[str, Any]
) -> None:
    first = build(tmp_path / "first", **{"max_steps": 4, "save_strategy": "steps", "save_steps": 4, **before})
    first.train()
    synchronous, ahead = (
        build(tmp_path / str(staleness), **{"max_steps": 12, **changed, "async_staleness": staleness})
        for staleness in (0, 2)
    )
    for rest in (synchronous, ahead):
        rest.train(resume_from_checkpoint=str(tmp_path / "first/checkpoint-4"))
    assert asked(synchronous) == asked(ahead)


class Dies(TrainerCallback):  # type: ignore[misc]
    """The engine of a trainer is gone once a step has been made."""

    def __init__(self, trainer: Any, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step, self.gone, self.saved = step, False, list[int]()
        engine = PolicyCopies.engine

        def mortal(copies: Any, *args: Any) -> Any:
            made = engine(copies, *args)
            poll = made.poll
            made.poll = lambda: self.refuse() if self.gone and copies._host is trainer._host else poll()
            return made

        monkeypatch.setattr(PolicyCopies, "engine", mortal)
        trainer.add_callback(self)

    def refuse(self) -> None:
        raise EngineUnavailable("connection refused")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.gone |= state.global_step == self.step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved.append(state.global_step)


def test_a_run_whose_engine_is_gone_goes_on_from_where_it_ended(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(tmp_path / "first", save_strategy="steps", save_steps=100)
    dies = Dies(first, 6, monkeypatch)
    with pytest.raises(EngineUnavailable, match=r"connection refused\. Resume from .*checkpoint") as caught:
        first.train()
    assert not threads()
    (step,) = dies.saved
    folder = tmp_path / f"first/checkpoint-{step}"
    assert str(folder) in str(caught.value) and step == first.state.global_step in (8, 12)
    rest = build(tmp_path / "rest")
    rest.train(resume_from_checkpoint=str(folder))
    assert asked(first) + asked(rest) == asked(whole)
    assert rest.state.global_step == 24 and all(age <= 2 for age in logged(rest, "async/age_max"))


def test_what_was_overtaken_is_taken_up_by_the_same_kind_of_run(tmp_path: Path) -> None:
    completed = {"async_order": "completed", "per_device_train_batch_size": 8, "save_strategy": "steps"}
    build(tmp_path / "first", **completed, max_steps=4, save_steps=4).train()
    file = tmp_path / "first/checkpoint-4/generation_cycle_0.pt"
    state = torch.load(file, weights_only=True)
    state["ahead"]["late"] = [(0, 1)]
    for i, (saved, changed, named) in enumerate(
        (
            ({}, {"async_order": "dataset"}, "`async_order`"),
            ({}, {"async_staleness": 0}, "`async_order`"),
            ({"world_size": 2}, {}, "`world_size`"),
        )
    ):
        torch.save(state | saved, file)
        with pytest.raises(UserMistake, match=named):
            build(tmp_path / str(i), **{**completed, **changed}).train(resume_from_checkpoint=str(file.parent))


def test_a_failure_under_way_reaches_the_training_thread(tmp_path: Path) -> None:
    trainer = build(tmp_path)
    down = ValueError("the index is gone")
    search = trainer.rollout_func.search

    def fail(queries: Any, k: int) -> Any:
        raise down

    search.search_batch = fail
    with pytest.raises(ValueError, match="the index is gone"):
        trainer.train()
    assert not threads()


class Noted(SearchRollout):
    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return {**super().__call__(prompts, trainer), "noted": [True] * len(prompts)}


def test_what_cannot_be_sampled_ahead_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`AgentRollout`"):
        native_agent(tmp_path, agent_policy(), async_staleness=1)
    with pytest.raises(ValueError, match="`AgentRollout`"):
        build(tmp_path / "noted", rollout_func=Noted(NoSearch(), PROTOCOL, LIMITS))
    with pytest.raises(ValueError, match="`train_dataset`"):
        build(tmp_path / "images", train_dataset=questions().add_column("image", [None] * 8))
    with pytest.raises(ValueError, match="`cast_lm_head_to_fp32`"):
        build(tmp_path / "cast", cast_lm_head_to_fp32=True)
    trainer = build(tmp_path)
    trainer.rollout_func.engine = EngineOptions(rollout_engine="lockstep")
    with pytest.raises(ValueError, match="'lockstep'"):
        check_ahead(trainer._host)
    trainer.train_dataset = questions().to_iterable_dataset()
    with pytest.raises(ValueError, match="`train_dataset`"):
        check_ahead(trainer._host)
