"""The examples that a reader copies: each configures a run in which the method acts."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from sorl_trl import SOGRPOConfig, SOPPOConfig
from sorl_trl.trainers.checks.inert import inert_warning
from sorl_trl.trainers.checks.options import idle_options, search_rollout_problems

ROOT = Path(__file__).parents[2]
CONFIGS: dict[str, Any] = {"SOGRPOConfig": SOGRPOConfig, "SOPPOConfig": SOPPOConfig}
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*_trainer.py")]
EXAMPLES = [
    (page.name, line) for page in PAGES for line in re.findall(r"args=(SO\w+Config\([^()]*\))", page.read_text())
]


def test_there_are_examples() -> None:
    assert {name for name, _ in EXAMPLES} >= {"README.md", "so_grpo_trainer.py", "so_ppo_trainer.py"}


@pytest.mark.parametrize(("page", "example"), EXAMPLES)
def test_the_method_acts(page: str, example: str) -> None:
    call = ast.parse(example, mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    config = CONFIGS[call.func.id](**arguments, use_cpu=True, bf16=False)
    assert inert_warning(config) is None, f"{page}: {example}"
    assert not [*search_rollout_problems(config), *idle_options(config)]
