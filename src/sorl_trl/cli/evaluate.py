"""Evaluate a checkpoint: `evaluate.py` and `sorl evaluate RUN`.

RUN is the output of `sorl train`, a checkpoint in it, a PEFT adapter's folder, or a Hub id. The recipe that trained it
(or `--config`) says how the agent is asked and where it searches, and a flag overrides it. Under `accelerate launch`,
the processes share the batches, and the result is the same as with one. Started again, an interrupted evaluation
continues; so does one whose search engine failed, with the questions that were lost.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sorl_trl import qa
from sorl_trl.command_line import (
    RECIPES,
    Parser,
    UserMistake,
    check_checkpoint,
    is_first_process,
    read_config,
    refuse,
    run_command,
    take_config,
)
from sorl_trl.files import missing
from sorl_trl.records import RECIPE_FILE, checkpoints, evaluation_of, policy_in
from sorl_trl.search.arguments import SOURCES

PATHS = ("corpus", "index", "data_source_folder")


def read_words(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Complete a command line with its model and its output, and read its recipe.

    Raises:
        UserMistake: They name something that does not exist. No slow import has happened yet.
    """
    config, words = take_config(words)
    if words and not words[0].startswith("-"):
        words = ["--model_name_or_path", *words]
        if words[2:] and not words[2].startswith("-"):
            refuse(f"{words[2]!r} belongs to no argument of sorl evaluate")
    given = _given(words)
    said = {} if config is None else read_config(RECIPES.find(config), words, SOURCES)
    own = {} if "train_questions" in said else said  # a file of arguments for evaluation
    name, output = (vars(given)[each] or own.get(each) for each in ("model_name_or_path", "output"))
    if name is not None:
        policy = evaluated_policy(name, output)
        output = output or str(evaluation_of(name))
        words = [*words, "--model_name_or_path", policy, "--output", output]
        folder = Path(policy)
        of_run = [folder.parent] if folder in checkpoints(folder.parent) else []
        beside = [each / RECIPE_FILE for each in (folder, *of_run)]
        found = next((path for path in beside if path.is_file()), None)
        said = said if config or found is None else read_config(found, words, SOURCES)
    _take_questions(said, given)
    check_paths({**said, **{name: value for name, value in vars(given).items() if value}})
    return words, said


def _given(words: Sequence[str]) -> Namespace:
    """Arguments whose values must exist, as the command line itself gives them."""
    parser = Parser(add_help=False)
    for name in ("model_name_or_path", "output", *PATHS):
        parser.add_argument(f"--{name}")
    for name in ("questions", "benchmarks"):
        parser.add_argument(f"--{name}", nargs="*")
    return parser.parse_known_args(words)[0]


def evaluated_policy(name: str, output: str | None) -> str:
    """The folder of the policy in the folder `name`, or `name` itself if it is a Hub id."""
    folder = Path(name)
    if not folder.exists():
        if output is None:
            raise UserMistake(f"{name} does not exist: name the folder of a run, or a model on the Hub and `--output`")
        check_checkpoint(name)
        return name
    policy = policy_in(folder)
    if policy is None:
        raise UserMistake(f"{name} holds no policy: name the folder of a run that has saved one, or of a checkpoint")
    if policy != folder and is_first_process():
        print(f"{folder} has no final policy yet: evaluating {policy}")
    return str(policy)


def check_paths(arguments: Mapping[str, Any]) -> None:
    """Raise UserMistake for a path that does not exist, and for an output folder that holds a policy."""
    named = [(name, arguments[name]) for name in PATHS if arguments.get(name)]
    named += [("questions", path) for path in arguments.get("questions") or ()]
    for name, path in named:
        if not Path(path).exists():
            raise UserMistake(missing(name, path))
    output = arguments.get("output")
    if output and policy_in(output):
        raise UserMistake(f"`output` is {output!r}, which holds a policy: name a folder where nothing else is")


def _take_questions(recipe: dict[str, Any], given: Namespace) -> None:
    """Take the questions that training evaluates on if the command line names none."""
    asked = recipe.get("eval_questions")
    if asked is not None and not given.questions and not given.benchmarks:
        recipe["benchmarks" if asked in (*qa.BENCHMARKS, *qa.BFCL_BENCHMARKS) else "questions"] = [asked]


def main(words: Sequence[str]) -> None:
    if not words:
        refuse("sorl evaluate needs the folder of a run")
    words, config = read_words(words)
    from sorl_trl.cli.evaluation_run import parse_arguments, run_evaluation  # takes seconds

    run_evaluation(parse_arguments(words, config))


if __name__ == "__main__":
    sys.exit(run_command(main))
