"""Every field that our configs and the scripts' arguments add has a test that shows it at work, and this names it.

Not that a value is accepted or refused: something else happens than without it.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from trl import GRPOConfig

from sorl_trl import SeeUPOConfig, SOGRPOConfig, SOPPOConfig
from sorl_trl.diagnostics.collapse_guard import GuardSettings
from sorl_trl.evaluation import EvaluationArguments
from sorl_trl.recipe.arguments import TaskArguments, TrainerArguments
from sorl_trl.rollout import EngineOptions, RolloutArguments
from sorl_trl.search.arguments import SearchArguments
from sorl_trl.trainers.base_config import TurnLevelConfig
from sorl_trl.trainers.options.credit import CreditOptions
from sorl_trl.trainers.options.groups import GroupOptions
from sorl_trl.trainers.options.loss import LossOptions
from tests.named_tests import function_of, what_it_tries

OF_BOTH = "integration/test_switches.py::test_switches_of_both_trainers"
OF_THE_CRITIC = "integration/test_switches.py::test_switches_of_the_critic"
SAMPLING = "integration/test_evaluate.py::test_every_argument_of_sampling_counts"
GUARD = "integration/test_collapse_guard.py::TestRollBack::"
GROUPS = "integration/test_group_options.py::"
SEARCH = "unit/search/test_search_arguments.py::"

SEEUPO = "integration/test_seeupo.py::"
CREDIT = "integration/test_credit.py::"
GAIN = "integration/test_information_gain.py::"

TESTS: dict[type, dict[str, str]] = {
    TurnLevelConfig: {
        "loss_type": OF_BOTH,
        "importance_sampling_level": OF_BOTH,
        "turn_ratio": OF_BOTH,
        "clip_range_scaling": OF_BOTH,
        "clip_normalization": OF_BOTH,
        "ctn_coef": OF_BOTH,
        "kl_estimator": OF_BOTH,
        "ctn_gate": OF_BOTH,
        "ctn_epsilon": OF_BOTH,
        "ctn_epsilon_high": OF_BOTH,
        "gamma": OF_BOTH,
        "turn_boundary": OF_BOTH,
        "turn_boundary_tags": OF_BOTH,
        "target_kl": "integration/test_target_kl.py::test_the_factor_falls_and_holds_the_kl",
        "rollout_staleness": "integration/test_stale_rollouts.py::test_trajectories_are_as_old_as_asked",
        "save_trajectories_steps": "integration/test_trajectory_dump.py::test_every_so_many_steps",
        "disable_dropout": "integration/test_training_noise.py::test_dropout_that_is_wanted_is_said",
    },
    GroupOptions: {
        "group_baseline": GROUPS + "TestBaseline::test_outcomes_are_compared_with_the_others_of_their_group",
        "group_filter": GROUPS + "TestFilter::test_groups_that_agree_are_dropped",
        "group_filter_share": GROUPS + "TestFilter::test_the_share_decides",
        "group_filter_reward": GROUPS + "TestFilter::test_the_named_reward_decides",
        "group_refill": "integration/test_group_refill.py::test_slots_without_a_spread_take_groups_of_other_prompts",
        "mask_void_trajectories": GROUPS + "TestVoid::test_void_trajectories_leave_the_loss_and_stay_in_the_baseline",
    },
    LossOptions: {
        "double_sided_clip": "integration/test_double_sided_clip.py::test_it_changes_training",
        "llds_coef": "integration/test_llds.py::test_it_changes_training",
        "vllm_importance_sampling_mode": "integration/test_engine_mismatch.py::test_it_changes_training",
        "mismatch_veto": "integration/test_engine_mismatch.py::test_it_changes_training",
        "minirl_cap": "integration/test_minirl.py::test_it_and_minirl_cap_change_training",
    },
    CreditOptions: {
        "turn_reward_normalization": CREDIT + "TestSeparate::test_it_makes_a_difference",
        "information_gain_coef": GAIN + "TestInformationGain::test_it_is_what_each_turn_adds",
        "information_gain_column": GAIN + "TestInformationGain::test_its_column_is_read",
        "information_gain_prefix": GAIN + "TestInformationGain::test_a_prefix_of_ones_own",
        "step_advantage_coef": CREDIT + "TestStepAdvantages::test_it_makes_a_difference",
    },
    SOGRPOConfig: {},
    SeeUPOConfig: {
        "clip_range_scaling": SEEUPO + "TestOptions::test_it_makes_a_difference",
        "target_kl": SEEUPO + "TestOptions::test_it_makes_a_difference",
        "importance_sampling_level": "unit/trainers/test_seeupo_config.py::test_what_has_no_meaning_is_refused",
        "scale_rewards": "unit/trainers/test_seeupo_config.py::test_what_has_no_meaning_is_refused",
    },
    SOPPOConfig: {
        "advantage_level": OF_THE_CRITIC,
        "gae_lambda": OF_THE_CRITIC,
        "whiten_advantages": OF_THE_CRITIC,
        "kl_in_reward": OF_THE_CRITIC,
        "critic_trunk_gradient": OF_THE_CRITIC,
        "vf_coef": OF_THE_CRITIC,
        "value_clip_range": OF_THE_CRITIC,
        "num_generations": "integration/test_so_ppo.py::test_a_group_of_trajectories_per_prompt",
        "num_generations_eval": "integration/test_so_ppo.py::test_a_group_of_its_own_in_evaluation",
        "scale_rewards": "integration/test_options.py::test_a_critic_replaces_the_group",
        "ddp_find_unused_parameters": "integration/test_critic_setup.py::test_the_search_for_unused_parameters",
        "critic": "integration/test_critic_setup.py::test_each_kind_of_critic",
        "critic_model_name_or_path": "integration/test_critic_options.py::test_a_larger_model_as_the_critic",
        "critic_learning_rate": "integration/test_critic_options.py::TestLearningRates::test_the_critic_has_its_own",
        "critic_warmup_steps": (
            "integration/test_critic_options.py::TestLearningRates::test_after_warm_up_the_policys_is_the_schedules"
        ),
    },
    RolloutArguments: {
        "prompt_template": SAMPLING,
        "protocol": SAMPLING,
        "max_turns": SAMPLING,
        "max_turn_tokens": SAMPLING,
        "max_observation_tokens": SAMPLING,
        "on_long_observation": SAMPLING,
        "search_top_k": SAMPLING,
        "chat": "integration/test_evaluate.py::test_a_chat_model_is_asked_through_its_template",
    },
    EngineOptions: {
        "rollout_engine": "integration/test_engine_options.py::test_the_engine_is_the_one_named",
        "rejoin_after": "integration/test_engine_options.py::test_options_of_the_engine_reach_the_rollout",
        "search_concurrency": "integration/test_engine_options.py::test_options_of_the_engine_reach_the_rollout",
        "kv_cache_gib": "integration/test_engine_options.py::test_options_of_the_engine_reach_the_rollout",
    },
    SearchArguments: {
        "index": SEARCH + "test_a_corpus_is_indexed_beside_it_and_the_index_can_be_named_then",
        "corpus": SEARCH + "test_a_corpus_is_indexed_beside_it_and_the_index_can_be_named_then",
        "search_engine": SEARCH + "test_a_corpus_is_indexed_with_the_engine_that_is_named",
        "search_url": SEARCH + "test_a_server_is_asked_in_the_format_that_is_named",
        "search_request": SEARCH + "test_a_server_is_asked_in_the_format_that_is_named",
        "no_search": SEARCH + "test_no_search_finds_nothing",
        "replay": SEARCH + "test_what_was_recorded_is_replayed",
        "record": SEARCH + "test_what_was_recorded_is_replayed",
        "search_cache": SEARCH + "test_a_cache_goes_inside_of_the_recording",
    },
    EvaluationArguments: {
        "temperature": SAMPLING,
        "top_p": SAMPLING,
        "num_samples": SAMPLING,
        "max_completion_length": SAMPLING,
        "seed": SAMPLING,
        "limit": SAMPLING,
        "batch_size": "integration/test_evaluate.py::test_output_has_a_file_for_each_batch",
        "output": "integration/test_evaluate.py::test_output_has_a_file_for_each_batch",
        "questions": "integration/test_evaluate.py::test_a_greedy_run_over_three_datasets",
        "benchmarks": "integration/test_evaluate.py::test_a_greedy_run_over_three_datasets",
        "data_source_folder": "integration/test_evaluate.py::test_a_greedy_run_over_three_datasets",
    },
    TrainerArguments: {"trainer": "integration/test_train.py::test_the_trainer_is_the_one_named"},
    TaskArguments: {
        "train_questions": "integration/test_train.py::test_questions_of_public_sets",
        "eval_questions": "integration/test_train.py::test_questions_of_public_sets",
        "rewards": "integration/test_train.py::test_rewards_are_those_named",
        "collapse_guard": "integration/test_train.py::test_the_guard_acts_as_it_is_told",
    },
    GuardSettings: {
        "lr_factor": GUARD + "test_lowers_again_what_the_checkpoint_does_not_know",
        "max_interventions": "integration/test_collapse_guard.py::TestLowerLearningRate::"
        "test_interventions_are_counted_when_resumed",
        "cooldown": "unit/diagnostics/test_collapse_guard.py::test_what_no_rule_has_seen_is_not_healthy",
        "margin": "unit/diagnostics/test_collapse_guard.py::test_what_no_rule_has_seen_is_not_healthy",
    },
}
"""Config -> field -> the test. What a subclass inherits as it is stands with its parent."""
CASES = [(config, name) for config, tests in TESTS.items() for name in tests]


def own_fields(config: Any) -> set[str]:
    """The fields that a class declares itself; of TRL's config none that it takes over unchanged."""
    return set(vars(config).get("__annotations__", {})) & {each.name for each in dataclasses.fields(config)}


@pytest.mark.parametrize("config", TESTS, ids=lambda config: config.__name__)
def test_every_field_has_a_test(config: type) -> None:
    inherited = TESTS[TurnLevelConfig] if issubclass(config, TurnLevelConfig) else {}
    missing = own_fields(config) - set(TESTS[config]) - set(inherited)
    assert not missing, f"no test shows these at work: {sorted(missing)}"
    assert not set(TESTS[config]) - own_fields(config)


@pytest.mark.parametrize(("config", "field"), CASES, ids=lambda case: getattr(case, "__name__", case))
def test_its_test_is_about_it(config: type, field: str) -> None:
    test = TESTS[config][field]
    assert re.search(rf"\b{field}\b", what_it_tries(function_of(test))), f"{test} does not name `{field}`"


def test_our_fields_are_seen() -> None:
    assert {"turn_ratio", "loss_type"} <= own_fields(TurnLevelConfig)
    assert "learning_rate" not in own_fields(TurnLevelConfig) | own_fields(SOPPOConfig)
    assert own_fields(TurnLevelConfig) - {each.name for each in dataclasses.fields(GRPOConfig)}
