"""The model card beside each checkpoint names what trained the policy, and credits what the settings hold."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from sorl_trl import SOGRPOTrainer, SOPPOTrainer
from sorl_trl.experimental import SeeUPOTrainer
from sorl_trl.methods import METHODS, SETTINGS, Method
from tests.training import saved_policy, settings
from tests.trajectories import FixedRollout, parity_reward, prompts

SORL, GRPO, SEEUPO = "2511.20718", "2402.03300", "2602.06554"
TOKEN = {"importance_sampling_level": "token"}


def card_of(trainer_class: Any, folder: Path, tokenizer: Any, method: Any = None, **config: Any) -> ModelCard:
    rows = prompts()
    rows.info.dataset_name = "questions.jsonl"
    arguments = settings(folder, max_steps=1, save_strategy="steps", save_steps=1, save_only_model=True, **config)
    trainer = trainer_class(
        saved_policy(folder), parity_reward, trainer_class.config_class(**arguments), rows,
        processing_class=tokenizer, rollout_func=FixedRollout(), method=method,
    )  # fmt: skip
    trainer.train()
    return ModelCard.load(folder / "README.md")


@pytest.mark.parametrize(
    ("trainer_class", "method", "config", "named", "papers"),
    [
        (SOGRPOTrainer, None, {}, "trained with SO-GRPO,", {SORL}),
        (SOGRPOTrainer, "grpo", {}, "trained with GRPO with turn-level importance ratios,", {SORL, GRPO}),
        (SOGRPOTrainer, None, TOKEN, "trained with GRPO with a gated KL penalty,", {SORL}),
        (SOGRPOTrainer, "grpo", TOKEN, "trained with GRPO,", {GRPO}),
        (SOPPOTrainer, None, {}, "trained with SO-PPO,", {SORL}),
        (SOPPOTrainer, Method(), TOKEN, "trained with PPO.", set()),
        (SeeUPOTrainer, None, {"num_iterations": 3}, "trained with SeeUPO,", {SEEUPO}),
    ],
)
def test_what_is_credited(
    tmp_path: Path, tokenizer: Any, trainer_class: Any, method: Any, config: Any, named: str, papers: set[str]
) -> None:
    text = card_of(trainer_class, tmp_path, tokenizer, method, **config).text
    assert named in text and ("credit:" in text) == (trainer_class is not SOPPOTrainer)
    assert {paper for paper in (SORL, GRPO, SEEUPO) if paper in text} == papers


def test_what_the_run_was(tmp_path: Path, tokenizer: Any) -> None:
    pieces = {"credit": "leave_one_out", "keep": ["zero_variance"]}
    card = card_of(SOGRPOTrainer, tmp_path, tokenizer, pieces, epsilon=0.15, scale_rewards="none")
    here = f"sorl-trl {version('sorl-trl')} |"
    for said in ("| questions.jsonl |", here, "parity_reward", "LeaveOneOut()", "ZeroVariance()"):
        assert said in card.text
    assert "`epsilon=0.15`" in card.text and "`importance_sampling_level='turn'`" in card.text
    assert "None" not in card.text
    assert {"trl", "so-grpo", "generated_from_trainer"} <= {*card.data.tags}, "the metadata is TRL's"
    assert "named method" not in card.text


def test_a_named_method_has_its_source(tmp_path: Path, tokenizer: Any) -> None:
    text = card_of(SOGRPOTrainer, tmp_path, tokenizer, "loop", **SETTINGS["loop"]).text
    assert f"`loop`: {METHODS['loop'].source} |" in text and "2502.01600" in METHODS["loop"].source
