"""Where arguments stand, and recipes that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from sorl_trl.doctor import examine
from sorl_trl.doctor.reading.arguments import read_arguments
from sorl_trl.doctor.reading.recipe_file import RecipeFile, read_recipe
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
    assert (found.level, found.what) == ("warning", "`max_turns` stands in lines 8, 20; the last counts")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: 1\nbeta: [1\n", "r.yaml line 3"),
        ("seed: 1\n\tbeta: 1\n", "r.yaml line 2"),
        ("- seed\n", "must be a YAML mapping"),
        ("seed: 1\n? [seed, beta]\n: 1\n", "r.yaml line 2: found unhashable key"),
        ("seed:\n  a:\n    ? [1]\n    : 1\n", "r.yaml line 3: found unhashable key"),
        ("seed: 1\nyes: 1\n", "r.yaml line 2: a key must be the name of an argument"),
        ("seed: 1\n7: 1\n", "r.yaml line 2: a key must be the name of an argument"),
        ("seed: 2024-13-45\n", "r.yaml: month must be in 1..12"),
        ("seed: " + "[" * 5000, "r.yaml: maximum recursion depth exceeded"),
        ("", "must be a YAML mapping"),
    ],
)
def test_no_recipe(tmp_path: Path, text: str, said: str) -> None:
    found = the_complaint(Path(write(tmp_path, text)))
    assert (found.level, found.check) == ("error", "arguments")
    assert said in found.what


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes(b"seed: \xff\n")
    assert the_complaint(tmp_path / "r.yaml").what.startswith(f"{tmp_path}/r.yaml: 'utf-8' codec")


def test_merged_keys(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    recipe.write_text(recipe.read_text() + "<<: {seed: 3}\n")
    assert not complaints(recipe)


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


def test_refused_arguments_hide_neither_each_other_nor_the_rest(tmp_path: Path) -> None:
    wrong = {"train_questions": None, "learning_rate": "fast", "use_cpu": "perhaps", "max_grad_norm": "none"}
    recipe = write_recipe(tmp_path, **wrong, protocol="xml", beta=-1.0)
    found = complaints(recipe, "--max_turns", "x", "--rewards", "--no_gradient_checkpointing=3", "--seed")
    assert {finding.change.split()[0] for finding in found} >= {
        *("train_questions", "learning_rate", "use_cpu", "max_grad_norm", "protocol"),
        *("--max_turns", "--rewards", "--seed"),
    }
    said = {finding.check: finding for finding in examine(str(recipe))}
    assert said["search"].level == "skipped"
    assert said["model"].level == "ok"


def test_what_is_refused_gets_its_default(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, max_turns="many", rewards=["f1"], learning_rate="fast")
    words = ["--config", str(recipe), "--rewards", "--max_completion_length", "long"]
    read = read_arguments(read_recipe(str(recipe), words[2:]), words, 1)
    assert len(read.findings) == 4
    assert read.raw.max_turns == 2
    assert read.raw.rewards == ["exact_match"]
    assert read.config is not None
    assert read.config.learning_rate == type(read.config).learning_rate
    assert read.raw.max_turn_tokens == 6, "what is not refused stays"


def test_without_questions_the_search_is_skipped_and_the_model_looked_at(tmp_path: Path) -> None:
    found = examine(str(write_recipe(tmp_path, train_questions=None)))
    skipped = {finding.check for finding in found if finding.level == "skipped"}
    assert skipped == {"batches", "tokens", "search", "rehearsal"}
    assert {finding.check for finding in found if finding.level == "ok"} >= {"model", "tags", "method"}


def test_words_that_belong_to_nothing(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    found = the_complaint(recipe, "foo")
    assert (found.check, found.level, found.what) == ("arguments", "error", "'foo' belongs to no argument of train.py")
    assert found.change == "foo  (command line)"
    assert len(complaints(recipe, "foo", "-x", "--seed", "3", "bar")) == 3
    assert "`max_turnz`" in the_complaint(recipe, "--max_turnz", "3").what, "3 is its value"


def test_what_cannot_be_gone_around_is_told(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    assert the_complaint(recipe, "--max_t", "3").what.startswith("ambiguous option: --max_t could match")
    recipe.write_text(recipe.read_text() + "env: here\n")
    assert the_complaint(recipe).what == "`env` field should be a dict in the YAML file."


def test_the_command_line_is_read_as_train_reads_it(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, num_generations=3)
    assert not complaints(recipe, "--num_generations", "4")
    found = the_complaint(recipe, "--num_generations", "5", "--rewards", "exact_match", "f1")
    assert found.change == "--num_generations 4  (command line)"
    assert the_complaint(recipe, "--num_generations", "4", "--max_turnz=3").change == "--max_turnz  (command line)"
