"""What a command line is refused for before the libraries are imported: never for what parsing would take."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from trl import TrlParser

from sorl_trl.command_line import UserMistake, mistakes
from sorl_trl.recipe.arguments import TRAINERS, argument_groups
from sorl_trl.recipe.first_look import look_over
from sorl_trl.shipped import RECIPES

TRAIN = ["--train_questions", "nq", "--model_name_or_path", "."]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_no_option_is_refused(trainer: str) -> None:
    for parser in (TrlParser(argument_groups(TRAINERS[trainer])), launch_command_parser()):
        options = [option for option in parser._option_string_actions if option.startswith("--")]
        # Each with a value, as a part of its own: some would take the next one for theirs.
        look_over([*TRAIN, f"--trainer={trainer}", *(f"{option}=x" for option in options if option not in OWN)])


OWN = {"--trainer", "--config", "--help", *TRAIN[::2], *(option.replace("_", "-") for option in TRAIN[::2])}
"""Whose values are looked at."""


@pytest.mark.parametrize("recipe", RECIPES.paths)
def test_our_recipes_pass(recipe: str) -> None:
    look_over(["--config", recipe, *TRAIN])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "sorl train needs --train_questions and --model_name_or_path"),
        (["so_grpo"], "'so_grpo' belongs to no argument of sorl train"),
        (["--config", "nowhere.yaml"], "--config: 'nowhere.yaml' is neither a file nor"),
        ([*TRAIN, "--accelerate_config", "zero8"], "--accelerate_config: 'zero8' is neither a file nor"),
        ([*TRAIN, "--train-questions", "no.jsonl"], "`train_questions` is 'no.jsonl', but there is no such file"),
        ([*TRAIN, "--model_name_or_path", "./no"], "`model_name_or_path` is './no', but there is no such folder"),
    ],
)
def test_mistakes(words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserMistake, match=said), mistakes():
        look_over(words)
