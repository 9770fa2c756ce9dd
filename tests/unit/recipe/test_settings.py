from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sorl_trl.recipe import parse_arguments, write_settings
from sorl_trl.recipe.settings import set_fields
from sorl_trl.search import SearchArguments

ROOT = Path(__file__).parents[3]


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """Writes the settings of a recipe with some words more, and reads them."""
    (tmp_path / "data.jsonl").touch()

    def write(recipe: str, *words: str) -> dict[str, Any]:
        here = ["--train_questions", str(tmp_path / "data.jsonl"), "--corpus", str(tmp_path / "data.jsonl")]
        config = ["--config", str(ROOT / f"recipes/{recipe}.yaml"), "--output_dir", str(tmp_path / "new" / "out")]
        write_settings(parse_arguments([*config, *here, *words]), tmp_path / "new" / "out")
        read: dict[str, Any] = json.loads((tmp_path / "new" / "out" / "settings.json").read_text())
        return read

    return write


def test_what_is_not_at_its_default(written: Any) -> None:
    found = written("so_ppo", "--method", "starpo_s", "--kl_in_reward", "true", "--beta", "0.1")
    expected = {"trainer": "so_ppo", "method": "starpo_s", "epsilon_high": 0.28, "kl_in_reward": True}
    expected |= {"learning_rate": 3e-4, "max_turns": 3, "protocol": "terse", "value_clip_range": None, "beta": 0.1}
    assert {name: found[name] for name in expected} == expected
    assert not {"dry_run", "gamma", "lora_r", "rejoin_after"} & found.keys()


def test_no_secret_is_written(written: Any) -> None:
    assert "hub_token" not in written("so_grpo", "--hub_token", "s3cret")


def test_no_user_of_a_url_is_written(written: Any) -> None:
    url = "http://me:s3cret@127.0.0.1:8000/retrieve"
    assert set_fields(SearchArguments(search_url=url)) == {"search_url": "http://127.0.0.1:8000/retrieve"}
    found = written("so_grpo", "--vllm_server_base_url", url)
    assert found["vllm_server_base_url"] == "http://127.0.0.1:8000/retrieve"
