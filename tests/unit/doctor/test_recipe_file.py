"""Where arguments stand, and recipes that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from sorl_trl.doctor.recipe_file import RecipeFile, read_recipe
from tests.unit.doctor.recipes import complaints, the_complaint, write_recipe


def write(folder: Path, text: str) -> str:
    path = folder / "r.yaml"
    path.write_text(text)
    return str(path)


@pytest.fixture
def recipe(tmp_path: Path) -> RecipeFile:
    text = "# first\nseed: 1\n\nprompt_template: |\n  beta: 3\n  gamma: 4\nrewards: [f1]\n'beta': 0\n"
    return read_recipe(write(tmp_path, text), ["--seed", "2", "--lora-r=3"])


def test_lines(recipe: RecipeFile) -> None:
    assert recipe.lines == {"seed": 2, "prompt_template": 4, "rewards": 7, "beta": 8}
    assert recipe.line("beta", 0.1) == f"beta: 0.1  ({recipe.path} line 8)"
    assert recipe.line("rewards", ["f1", "format"]) == f'rewards: ["f1", "format"]  ({recipe.path} line 7)'
    assert recipe.line("rewards") == f"rewards  ({recipe.path} line 7)"
    assert recipe.line("chat", False) == f"chat: false  (not in {recipe.path} yet)"


def test_the_command_line_goes_before_the_recipe(recipe: RecipeFile) -> None:
    assert recipe.line("seed", 3) == "--seed 3  (command line)"
    assert recipe.line("lora_r") == "--lora_r  (command line)"


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("`beta` is 0, but seed matters", "beta"),
        ("the seed of `gamma` is bad", "seed"),  # what is set goes before what is not
        ("gamma and epsilon", "gamma"),
        ("--lora_r/--lora-r: invalid int value", "lora_r"),
        ("nothing is named", ""),
    ],
)
def test_the_argument_of_a_message(recipe: RecipeFile, message: str, name: str) -> None:
    assert recipe.argument_in(message, {"beta", "seed", "gamma", "epsilon", "lora_r"}) == name


def test_a_key_that_stands_twice(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    path.write_text(path.read_text() + "max_turns: 2\n")
    found = the_complaint(path)
    assert (found.level, found.what) == ("warning", "`max_turns` stands in lines 8, 19; the last counts")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: 1\nbeta: [1\n", "r.yaml line 3"),
        ("seed: 1\n\tbeta: 1\n", "r.yaml line 2"),
        ("- seed\n", "must be a YAML mapping"),
        ("", "must be a YAML mapping"),
    ],
)
def test_no_recipe(tmp_path: Path, text: str, said: str) -> None:
    found = the_complaint(Path(write(tmp_path, text)))
    assert (found.level, found.check) == ("error", "arguments")
    assert said in found.what


def test_no_file(tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere.yaml") in the_complaint(tmp_path / "nowhere.yaml").what


def test_a_value_that_cannot_be_parsed(tmp_path: Path) -> None:
    found = the_complaint(write_recipe(tmp_path, max_turns="many"))
    assert "invalid int value: 'many'" in found.what
    assert found.change == f"max_turns  ({tmp_path}/recipe.yaml line 8)"


def test_a_missing_argument(tmp_path: Path) -> None:
    found = the_complaint(write_recipe(tmp_path, train_questions=None))
    assert "required" in found.what
    assert found.change == f"train_questions  (not in {tmp_path}/recipe.yaml yet)"


def test_the_command_line_is_read_as_train_reads_it(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, num_generations=3)
    assert not complaints(recipe, "--num_generations", "4")
    found = the_complaint(recipe, "--num_generations", "5", "--rewards", "exact_match", "f1")
    assert found.change == "--num_generations 4  (command line)"
    assert the_complaint(recipe, "--num_generations", "4", "--max_turnz=3").change == "--max_turnz  (command line)"
