"""What a setting cannot honour is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trl import GRPOTrainer

from sorl_trl import SearchRollout, SOGRPOConfig, SOGRPOTrainer, SOPPOTrainer
from sorl_trl.search import NoSearch
from sorl_trl.trainers.agents.agent_rollout import SET_BY_ROLLOUT
from tests.agents import (
    build_agent,
    native_agent,
    questions,
    recorded_policy,
    turns_reward,
)
from tests.training import cpu_config, settings
from tests.trajectories import FixedRollout, parity_reward, prompts

REFUSED: dict[str, tuple[Any, str]] = {
    "use_transformers_continuous_batching": (
        True,
        "`use_transformers_continuous_batching` is True, but it ignores stop strings",
    ),
    "max_tool_calling_iterations": (3, "`max_tool_calling_iterations` is 3, but is for TRL's tool loop"),
    "max_completion_length": (None, "`max_completion_length` is None"),
    "generation_kwargs": ({"max_new_tokens": 5}, "`generation_kwargs` has 'max_new_tokens': 5, but the rollout"),
}
"""Option -> a value that `SearchRollout` cannot honour, and what is said."""


@pytest.mark.parametrize("trainer_class", [SOGRPOTrainer, SOPPOTrainer])
@pytest.mark.parametrize("option", REFUSED)
def test_refused_before_a_model_is_loaded(tmp_path: Path, option: str, trainer_class: Any) -> None:
    value, said = REFUSED[option]
    rollout = SearchRollout(NoSearch())
    chosen = cpu_config(tmp_path, trainer_class.config_class, **{option: value})
    with pytest.raises(ValueError, match=said):
        trainer_class("no/such-model", turns_reward, chosen, questions(), rollout_func=rollout)


def test_the_deprecated_names(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="`use_transformers_paged` is deprecated"):
        chosen = cpu_config(tmp_path, use_transformers_paged=True)
    with pytest.raises(ValueError, match="`use_transformers_continuous_batching` is True, but"):
        SOGRPOTrainer("no/such-model", turns_reward, chosen, questions(), rollout_func=SearchRollout(NoSearch()))


@pytest.mark.parametrize(
    "option",
    [{"auto_find_batch_size": True}, {"log_completions_hub_repo": "a/b"}],
    ids=lambda option: next(iter(option)),
)
def test_refused_by_trl(tmp_path: Path, option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        cpu_config(tmp_path, **option)


@pytest.mark.parametrize("argument", ["tools", "environment_factory"])
def test_tools_beside_a_search_rollout(tmp_path: Path, argument: str) -> None:
    rollout, given = SearchRollout(NoSearch()), {"tools": [len], "environment_factory": dict}[argument]
    with pytest.raises(ValueError, match="`tools` or `environment_factory` is given together with a rollout"):
        SOGRPOTrainer(
            "no/such-model",
            turns_reward,
            cpu_config(tmp_path),
            questions(),
            rollout_func=rollout,
            **{argument: given},
        )


@pytest.mark.parametrize("option", [name for name in REFUSED if name != "max_completion_length"])
def test_trls_own_trainer_is_told_in_its_first_rollout(tmp_path: Path, option: str) -> None:
    value, said = REFUSED[option]
    trainer = build_agent(tmp_path, NoSearch(), GRPOTrainer, **{option: value})
    with pytest.raises(ValueError, match=said):
        trainer.train()


@pytest.mark.parametrize("engine", SET_BY_ROLLOUT)
def test_ends_and_outputs_are_the_rollouts(tmp_path: Path, engine: str) -> None:
    for key in SET_BY_ROLLOUT[engine]:
        chosen = cpu_config(tmp_path, use_vllm=engine == "vllm", generation_kwargs={key: 2})
        with pytest.raises(ValueError, match=f"`generation_kwargs` has '{key}': 2"):
            SearchRollout(NoSearch()).check(chosen)
    free = {"top_k": 3, "num_beams": 1, "max_length": None}
    SearchRollout(NoSearch()).check(cpu_config(tmp_path, generation_kwargs=free))


def test_other_rollouts_are_not_asked(tmp_path: Path, tokenizer: Any, policy: Any) -> None:
    """What a rollout function of somebody else's makes of these options is its own business."""
    chosen = SOGRPOConfig(**settings(tmp_path, max_tool_calling_iterations=3))
    SOGRPOTrainer(policy, parity_reward, chosen, prompts(), processing_class=tokenizer, rollout_func=FixedRollout())


@pytest.mark.parametrize("trainer_class", [SOGRPOTrainer, SOPPOTrainer])
def test_continuous_batching_in_trls_own_generation(tmp_path: Path, trainer_class: Any) -> None:
    trainer = native_agent(
        tmp_path,
        recorded_policy(),
        trainer_class,
        use_transformers_continuous_batching=True,
        # Few tokens at once: what they need must fit into the share, however little memory the machine has left.
        transformers_continuous_batching_config={"max_memory_percent": 0.02, "max_batch_tokens": 512},
        max_steps=1,
    )
    assert trainer.continuous_batching_config.max_memory_percent == 0.02
    trainer.train()
    assert trainer.model.asked == []  # `generate_batch` was called instead
    assert trainer.state.global_step == 1
