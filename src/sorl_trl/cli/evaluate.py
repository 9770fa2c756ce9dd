"""The commands `sorl evaluate` (also run by `evaluate.py`) and `sorl compare`; docs/how_to/evaluate.md shows them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sorl_trl.command_line import (
    Parser,
    UserMistake,
    check_checkpoint,
    is_first_process,
    mistakes,
    options_in,
    read_config,
    refuse,
    take_options,
)
from sorl_trl.records import RECIPE_FILE, checkpoints, evaluation_of, policy_in
from sorl_trl.search.arguments import SOURCES

COMPARISON = """\
Compares two evaluations on their common questions: means, differences, 95 % intervals and p. It prints a table
and writes nothing.

example: sorl compare runs/quickstart/greedy_before runs/quickstart/policy
"""


def main(words: Sequence[str]) -> None:
    words, recipe = read_words(words)
    from sorl_trl.evaluation.arguments import parse_arguments  # takes seconds
    from sorl_trl.evaluation.run import run_evaluation

    run_evaluation(parse_arguments(words, recipe))


def read_words(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Complete a command line with its model and output, and read the run's recipe.

    Raises:
        UserMistake: Something named does not exist. No slow import has happened yet.
    """
    run, words = (words[0], [*words[1:]]) if words and not words[0].startswith("-") else (None, [*words])
    (model, given_output), _ = take_options(words, "model_name_or_path", "output")
    name = model or run
    if not {"-h", "--help"}.isdisjoint(words):
        return words, {}
    if name is None:
        refuse("sorl evaluate needs RUN, the folder of a run, or --model_name_or_path")
    if given_output is None and not Path(name).exists():
        raise UserMistake(f"{name} does not exist: give the folder of a run, or a model on the Hub and `--output`")
    policy, output = find_policy(name), given_output or str(evaluation_of(name))
    if policy_in(output):
        raise UserMistake(f"`output` is {output!r}, which contains a policy: choose a folder without other files")
    recipe = read_recipe(Path(run or policy), words)
    if run and not recipe and model:
        raise UserMistake(f"{run} has no {RECIPE_FILE}: give a run with one, to set how {name} is asked")
    if (asked := recipe.get("eval_questions")) and "questions" not in options_in(words):
        recipe["questions"] = [asked]
    return [*words, "--model_name_or_path", policy, "--output", output], recipe


def find_policy(name: str) -> str:
    """The folder of the policy in the folder `name`, or `name` itself if it is a Hub id."""
    folder = Path(name)
    if not folder.exists():
        check_checkpoint(name)
        return name
    policy = policy_in(folder)
    if policy is None:
        raise UserMistake(f"{name} contains no policy: give the folder of a run that saved one, or a checkpoint")
    if policy != folder and is_first_process():
        print(f"{folder} has no final policy yet: using {policy}")
    return str(policy)


def read_recipe(run: Path, words: Sequence[str]) -> dict[str, Any]:
    """The recipe in a run's folder, or in that of a checkpoint's run; empty if there is none."""
    folders = [run, run.parent] if run in checkpoints(run.parent) else [run]
    files = [folder / RECIPE_FILE for folder in folders if (folder / RECIPE_FILE).is_file()]
    return read_config(files[0], words, SOURCES) if files else {}


def compare(words: Sequence[str]) -> None:
    """Print how two finished evaluations differ, question by question."""
    parser = Parser(prog="sorl compare", usage="sorl compare BEFORE AFTER", description=COMPARISON)
    parser.add_argument("before", metavar="BEFORE", help="a folder that `sorl evaluate` evaluated, or its `--output`")
    parser.add_argument("after", metavar="AFTER", help="the same for the other run")
    arguments = parser.parse_args(words)
    from sorl_trl.evaluation.figures import compare_runs, format_comparison, read_run

    with mistakes():
        comparisons = compare_runs(read_run(arguments.before), read_run(arguments.after))
    print(format_comparison(comparisons, arguments.before, arguments.after))
