"""`recipe.yaml`, which a run leaves behind: what was said, all that shapes the agent, and no secret."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from sorl_trl.command_line import UserMistake
from sorl_trl.qa import Question, write_questions
from sorl_trl.recipe.arguments import parse_arguments
from sorl_trl.recipe.written import RecipeWriter, write_recipe

ROOT = Path(__file__).parents[3]


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """Writes the recipe of a run with some words more, and reads it."""
    write_questions([Question("1", "who?", ("ann",))], tmp_path / "data.jsonl")

    def write(recipe: str, *words: str) -> dict[str, Any]:
        data = str(tmp_path / "data.jsonl")
        here = ["--train_questions", data, "--eval_questions", data, "--corpus", data]
        config = ["--config", str(ROOT / f"recipes/{recipe}.yaml"), "--output_dir", str(tmp_path / "new" / "out")]
        write_recipe(parse_arguments([*config, *here, *words]), tmp_path / "new" / "out")
        read: dict[str, Any] = yaml.safe_load((tmp_path / "new" / "out" / "recipe.yaml").read_text())
        return read

    return write


def test_what_was_said_and_what_shapes_the_agent(written: Any) -> None:
    found = written("so_ppo", "--method", "starpo_s", "--kl_in_reward", "true", "--beta", "0.1")
    said = {"trainer": "so_ppo", "method": "starpo_s", "kl_in_reward": True, "beta": 0.1, "learning_rate": 3e-4}
    agent = {"protocol": "terse", "max_turns": 3, "chat": False, "max_completion_length": 200, "search_top_k": 1}
    assert {name: found[name] for name in said | agent} == said | agent
    assert not {"dry_run", "gamma", "lora_r", "epsilon_high"} & found.keys()


def test_the_same_arguments_come_of_it_from_anywhere(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "critic").mkdir()
    given = ["--corpus", "data.jsonl", "--critic_model_name_or_path", "critic"]
    found = written("so_ppo_lora", *given, "--rewards", "f1", "format", "--gamma", "0.9")
    assert found["corpus"] == str(tmp_path / "data.jsonl")
    assert found["critic_model_name_or_path"] == str(tmp_path / "critic")
    monkeypatch.chdir("/")
    again = parse_arguments(["--config", str(tmp_path / "new/out/recipe.yaml")])
    assert again.task.rewards == ["f1", "format"]
    assert (again.config.gamma, again.config.steps_per_generation, again.model.use_peft) == (0.9, 4, True)
    assert again.given == found


def test_no_secret_is_written_nor_how_the_run_was_started(written: Any) -> None:
    url = ["--vllm_server_base_url", "http://me:s3cret@127.0.0.1:8000/retrieve"]
    found = written("so_grpo", "--hub_token", "s3cret", "--resume_from_checkpoint", "latest", *url)
    assert not {"hub_token", "resume_from_checkpoint"} & found.keys()
    assert found["vllm_server_base_url"] == "http://127.0.0.1:8000/retrieve"


@pytest.mark.parametrize("resumed", [None, "checkpoint-1"])
def test_two_runs_that_start_at_once_do_not_share_a_folder(written: Any, tmp_path: Path, resumed: str | None) -> None:
    """Both have found it free: building a trainer takes a while."""
    written("so_grpo")
    arguments = parse_arguments(["--config", str(tmp_path / "new/out/recipe.yaml")])
    args = SimpleNamespace(output_dir=str(tmp_path / "new/out"), resume_from_checkpoint=resumed)
    refused = pytest.raises(UserMistake, match="another run") if resumed is None else nullcontext()
    with refused:
        RecipeWriter(arguments).on_train_begin(args, SimpleNamespace(is_world_process_zero=True), None)
