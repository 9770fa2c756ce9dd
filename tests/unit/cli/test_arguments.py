"""What `train.py` refuses before anything is loaded, and what a method sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from sorl_trl.cli.arguments import Arguments, parse_arguments
from sorl_trl.cli.build import check_rewards
from sorl_trl.command_line import UserMistake


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").touch()
    return tmp_path


def parse(recipe: str = "", *words: str) -> Arguments:
    """With a recipe of these lines."""
    here = "train_questions: data.jsonl\ncorpus: data.jsonl\nuse_cpu: true\nbf16: false\n"
    Path("recipe.yaml").write_text(here + recipe)
    return parse_arguments(["--config", "recipe.yaml", *words])


def test_a_source_on_the_command_line_takes_the_place_of_the_recipes(folder: Path) -> None:
    search = parse("", "--search_url", "http://127.0.0.1:9/retrieve").search
    assert (search.corpus, search.search_url) == (None, "http://127.0.0.1:9/retrieve")
    with pytest.raises(UserMistake, match="got corpus, no_search"):
        parse("", "--no_search", "--corpus", "data.jsonl")


def test_an_agents_own_reward_is_the_default(folder: Path) -> None:
    assert parse("agent_command: agent\n").task.rewards == ["agent"]
    assert parse("agent_command: agent\nrewards: [os.path.join]\n").task.rewards == ["os.path.join"]
    assert parse().task.rewards == ["exact_match"]


def test_a_reward_that_was_removed_is_named_with_what_takes_its_place(folder: Path) -> None:
    with pytest.raises(UserMistake, match="was removed; `answer`"):
        parse("rewards: [exact_match, choice]\n")


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        ("rewards: [agent]\n", "'agent', which is what an agent returns"),
        ("agent_command: agent\nrewards: [agent, f1]\n", "'f1', which reads actions in tags"),
        ("rewards: [solved]\n", "'solved', which an environment gives"),
    ],
)
def test_a_reward_that_what_acts_does_not_give_is_refused(folder: Path, recipe: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        check_rewards(parse(recipe), [])


def test_a_method_with_a_critic_needs_its_trainer(folder: Path) -> None:
    with pytest.raises(UserMistake, match=r"`credit` of `method` 'ppo' is GAE.*`--trainer so_ppo`"):
        parse("method: ppo\n")
    parse("method: ppo\ntrainer: so_ppo\n")
