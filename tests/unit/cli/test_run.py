"""A run's folder: whose it is, which recipe it leaves there, and which one an evaluation of it reads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from sorl_trl.cli import run
from sorl_trl.cli.arguments import parse_arguments
from sorl_trl.cli.evaluate import read_words
from sorl_trl.cli.run import check_output_folder, write_recipe
from sorl_trl.qa import Question, write_questions


def check(folder: Path, resume: Path | None = None) -> None:
    check_output_folder(SimpleNamespace(output_dir=str(folder), resume_from_checkpoint=resume, max_steps=20))  # type: ignore[arg-type]


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.mark.parametrize("name", ["checkpoint-10/config.json", "adapter_config.json"])
def test_a_used_folder_is_refused_with_the_ways_out(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="`output_dir`") as refused:
        check(make(tmp_path, name))
    assert ("--resume_from_checkpoint latest" in str(refused.value)) == name.startswith("checkpoint")


def test_a_run_goes_on_in_its_own_folder_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "resume_point", lambda config, checkpoint: str(checkpoint))
    folder = make(tmp_path / "run", "checkpoint-10/config.json")
    check(folder, folder / "checkpoint-10")
    with pytest.raises(ValueError, match="`max_steps` is 20"):
        check(folder, folder / "checkpoint-20")
    with pytest.raises(ValueError, match="`output_dir`"):
        check(folder, tmp_path / "other" / "checkpoint-10")


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """Writes the recipe of a run with some words more, and reads it."""
    write_questions([Question("1", "who?", ("ann",))], tmp_path / "data.jsonl")

    def write(recipe: str, *words: str) -> dict[str, Any]:
        data = str(tmp_path / "data.jsonl")
        here = ["--train_questions", data, "--eval_questions", data, "--corpus", data]
        here += ["--output_dir", str(tmp_path / "new" / "out")]
        main: Any = SimpleNamespace(is_world_process_zero=lambda: True)
        write_recipe(parse_arguments(["--config", recipe, *here, *words]), main)
        read: dict[str, Any] = yaml.safe_load((tmp_path / "new" / "out" / "recipe.yaml").read_text())
        return read

    return write


def test_a_recipe_has_what_was_set_and_what_shapes_the_agent(written: Any) -> None:
    found = written("so_ppo", "--method", "s_ppo", "--vf_coef", "1.0", "--beta", "0.1")
    given = {"trainer": "so_ppo", "method": "s_ppo", "vf_coef": 1.0, "beta": 0.1, "learning_rate": 3e-4}
    agent = {"protocol": "terse", "max_turns": 3, "chat": False, "max_completion_length": 200, "search_top_k": 1}
    assert {name: found[name] for name in given | agent} == given | agent
    assert not {"dry_run", "gamma", "lora_r", "epsilon_high", "reward_on_error"} & found.keys()


def test_a_recipe_gives_the_same_arguments_from_anywhere(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "critic").mkdir()
    given = ["--corpus", "data.jsonl", "--critic_model_name_or_path", "critic"]
    found = written("so_ppo_lora", *given, "--rewards", "f1", "answer", "--gamma", "0.9")
    assert found["corpus"] == str(tmp_path / "data.jsonl")
    assert found["critic_model_name_or_path"] == str(tmp_path / "critic")
    monkeypatch.chdir("/")
    again = parse_arguments(["--config", str(tmp_path / "new/out/recipe.yaml")])
    assert again.task.rewards == ["f1", "answer"]
    assert (again.config.gamma, again.config.steps_per_generation, again.model.use_peft) == (0.9, 4, True)
    assert again.given == found


def test_no_secret_is_written_nor_how_the_run_was_started(written: Any) -> None:
    url = ["--vllm_server_base_url", "http://me:s3cret@127.0.0.1:8000/retrieve"]
    found = written("so_grpo", "--hub_token", "s3cret", "--resume_from_checkpoint", "latest", *url)
    assert not {"hub_token", "resume_from_checkpoint"} & found.keys()
    assert found["vllm_server_base_url"] == "http://127.0.0.1:8000/retrieve"


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A run that still trains."""
    make(tmp_path, "run/checkpoint-2/config.json")
    (tmp_path / "run/recipe.yaml").write_text("eval_questions: eval.jsonl\nmax_turns: 7\n")
    return tmp_path / "run"


def test_a_run_that_still_trains_is_not_evaluated_in_a_checkpoint(trained: Path) -> None:
    """Which training removes as it goes on."""
    words, _ = read_words([str(trained)])
    assert words == [
        *("--model_name_or_path", str(trained / "checkpoint-2")),
        *("--output", str(trained / "evaluation_checkpoint-2")),
    ]


@pytest.mark.parametrize(
    ("policy", "is_of_run"), [(".", True), ("checkpoint-2", True), ("other", False), ("checkpoint-x", False)]
)
def test_the_recipe_of_the_run_that_trained_it(trained: Path, policy: str, is_of_run: bool) -> None:
    make(trained, f"{policy}/config.json")
    for words in ([str(trained / policy)], ["--model_name_or_path", str(trained / policy)]):
        _, recipe = read_words(words)
        assert recipe.get("max_turns") == (7 if is_of_run else None)


def test_another_policy_is_asked_as_the_run_was_and_what_training_evaluates_on(trained: Path) -> None:
    """Unless something else is named."""
    base = make(trained.parent / "base", "config.json")
    words, recipe = read_words([str(trained), "--model_name_or_path", str(base)])
    assert (recipe["max_turns"], recipe["questions"]) == (7, ["eval.jsonl"])
    assert words[-4:] == ["--model_name_or_path", str(base), "--output", str(base / "evaluation")]
    assert "questions" not in read_words([str(trained), "--questions", "own.jsonl"])[1]
