"""The documentation against the code: metrics, functions, variants, seams and paths."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOTrainer

from sorl_trl import SearchRollout, SeeUPOTrainer, SOGRPOConfig, SOGRPOTrainer, SOPPOTrainer, ops
from sorl_trl.diagnostics.collapse_guard import ALARMS, INTERVENTIONS
from sorl_trl.diagnostics.plots import PANELS
from sorl_trl.diagnostics.progress import SHOWN
from sorl_trl.qa.rewards import REWARDS
from tests.agents import LIMITS, PROTOCOL, agent_policy, agent_tokenizer, questions, search_index
from tests.documentation import PAGES, ROOT, documented_metrics, page_name
from tests.training import settings
from tests.trl_seams import OVERRIDDEN, RELIED_ON

OURS = (
    "turns/",
    "clip_fraction/",
    "clip_range/",
    "kl_to_old",
    "clip_penalty",
    "clipping_bias_norm",
    "off_policy_age",
    "rollout/",
)
OURS += ("guard/", "trajectories_without_turn", "critic/", "advantages/", "reward_kl", "trajectories_unscored")
OURS += ("lr_factor", "groups/", "trajectories_void", "effective_sample_size", "llds/", "mismatch/")
OURS += ("information_gain/", "minirl/", "seeupo/")
TRANSFORMERS_OWN = {"loss", "grad_norm", "learning_rate", "epoch", "step", "train_loss", "total_flos", "train_runtime"}
TRANSFORMERS_OWN |= {"train_samples_per_second", "train_steps_per_second"}


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def is_ours(name: str) -> bool:
    return name.startswith(OURS)


def logged_metrics(folder: Path, trainer_class: Any = SOGRPOTrainer, **overrides: Any) -> set[str]:
    """What two steps of training on real rollouts log, but for transformers' own."""
    agent_policy().save_pretrained(folder / "policy")  # TRL loads the reference policy from where the policy is
    trainer = trainer_class(
        str(folder / "policy"),
        answer_reward,
        trainer_class.config_class(**settings(folder, max_completion_length=32, max_steps=2, beta=0.1, **overrides)),
        questions(32),
        processing_class=agent_tokenizer(),
        rollout_func=SearchRollout(search_index(folder), PROTOCOL, LIMITS),
    )
    trainer.train()
    names = {name for log in trainer.state.log_history for name in log}
    names = {re.sub(r"turn_\d+", "turn_<k>", name) for name in names - TRANSFORMERS_OWN}
    return {name.replace("answer_reward", "<name>") for name in names}


def answer_reward(trajectory: Any, **_: Any) -> list[float]:
    return [float(len(t.turns)) for t in trajectory]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    names: set[str] = set()
    for normalization in ("kl_penalty", "bias_norm"):
        names |= logged_metrics(
            tmp_path_factory.mktemp(normalization), clip_normalization=normalization, target_kl=0.1
        )
    scaled = {"importance_sampling_level": "sequence", "clip_range_scaling": "length", "llds_coef": 0.2}
    scaled |= {"information_gain_coef": 1.0, "step_advantage_coef": 1.0, "turn_reward_normalization": "separate"}
    names |= logged_metrics(tmp_path_factory.mktemp("scaled"), **scaled)
    groups = {"group_filter": "zero_variance", "group_baseline": "leave_one_out", "scale_rewards": "none"}
    groups |= {"group_refill": 1, "loss_type": "minirl"}
    names |= logged_metrics(tmp_path_factory.mktemp("groups"), mask_void_trajectories=True, **groups)
    names |= {ALARMS, INTERVENTIONS}  # tests/integration/test_collapse_guard.py sees them logged
    names |= {f"mismatch/{name}" for name in ("dropped_turns", "cut_weights", "vetoed_trajectories")}  # needs vLLM:
    # tests/integration/test_engine_mismatch.py sees them logged
    turns = {"num_iterations": 3, "steps_per_generation": 2, "gradient_accumulation_steps": 1}
    names |= logged_metrics(tmp_path_factory.mktemp("seeupo"), SeeUPOTrainer, **turns)
    return names | logged_metrics(tmp_path_factory.mktemp("ppo"), SOPPOTrainer, kl_in_reward=True)


@pytest.mark.trains
class TestMetrics:
    def test_what_is_logged_is_documented(self, logged: set[str]) -> None:
        assert {"reward", "kl", "rollout/masked_share", "clip_penalty", "clipping_bias_norm"} <= logged
        assert logged - documented_metrics() == set()

    def test_what_is_documented_as_ours_is_logged(self, logged: set[str]) -> None:
        assert {name for name in documented_metrics() - logged if is_ours(name)} == set()

    def test_trls_names_are_those_of_its_source(self) -> None:
        """Also those of features that no run here has: tools, vLLM, entropy bonus, other losses."""
        found = re.findall(r'_metrics\[(?:mode|"train")\]\[f?"([^"]+)"\]', inspect.getsource(GRPOTrainer))
        names = {re.sub(r"\{\w+\}", "<name>", name) for name in found}
        assert len(names) > 30
        assert {name for name in documented_metrics() if not is_ours(name)} == names

    def test_plots_and_progress_bar_show_documented_metrics(self) -> None:
        shown = {re.sub(r"rewards/\w+/", "rewards/<name>/", panel.metric) for panel in PANELS} | set(SHOWN.values())
        assert shown - documented_metrics() - TRANSFORMERS_OWN == set()


class TestPaperToCode:
    @pytest.mark.parametrize("name", [name for name in ops.__all__ if callable(getattr(ops, name))])
    def test_every_function_is_named(self, name: str) -> None:
        assert f"`{name}`" in page("paper_to_code.md")


def test_every_seam_is_in_architecture() -> None:
    """Each method of TRL's that is overridden, and each body that is relied on."""
    text = page("architecture.md")
    names = [*OVERRIDDEN, *(name.rpartition(".")[2] for name in RELIED_ON)]
    assert [name for name in names if f"`{name}`" not in text] == []


def named_paths(text: str) -> set[str]:
    """Files and folders of this repository that a page names in backticks or links to."""
    quoted = re.findall(r"`([\w.-]+(?:/[\w.<>-]+)*(?:\.(?:py|md|ya?ml|json|toml|txt)|/))`", text)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    return {*quoted, *filter(None, links)}


def exists(path: str, page_folder: Path) -> bool:
    """Paths start at the root, at the package, or, in links, at the page."""
    return any((base / path).exists() for base in (ROOT, ROOT / "src" / "sorl_trl", page_folder))


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_every_path_exists(path: Path) -> None:
    paths = named_paths(path.read_text())
    assert {name for name in paths if not exists(name, path.parent)} == set()


def headless_tables(text: str) -> list[str]:
    """The first rows of tables that no line of dashes follows: a reader sees them as text with bars."""
    lines = text.splitlines()
    tops = [i for i, line in enumerate(lines) if line.startswith("|") and not (i and lines[i - 1].startswith("|"))]
    return [lines[i] for i in tops if not re.fullmatch(r"\|(?: *:?-+:? *\|)+", "".join(lines[i + 1 : i + 2]))]


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_every_table_has_a_head(path: Path) -> None:
    assert headless_tables(path.read_text()) == []


def test_tables_without_a_head_are_found() -> None:
    assert headless_tables("| a | b |\n|---|---:|\n| 1 | 2 |\n\n| 3 | 4 |\n\ntext\n| 5 |") == ["| 3 | 4 |", "| 5 |"]


def test_rewards_that_penalize_invalid_actions_are_rewards() -> None:
    """Beside which `mask_void_trajectories` wins."""
    (about,) = [each for each in fields(SOGRPOConfig) if each.name == "mask_void_trajectories"]
    for text in (about.metadata["help"], page("methods/void_trajectories.md")):
        (names,) = re.findall(r"invalid\s+actions\s+\(([^)]*)\)", text)
        assert {*re.findall(r"`(\w+)`", names)} == {"format", "turn_format"} <= {*REWARDS}


def test_paths_are_found_in_text() -> None:
    text = "`ops/losses.py`, `src/sorl_trl/`, `turns/length`, [here](metrics.md#top), [there](https://a.b/c.md)"
    assert named_paths(text) == {"ops/losses.py", "src/sorl_trl/", "metrics.md"}
    assert exists("ops/losses.py", ROOT)
    assert not exists("ops/loss.py", ROOT)
