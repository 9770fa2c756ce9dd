"""What `sorl evaluate` does once its command line is parsed: asks, scores and reports."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import GenerationConfig, PreTrainedTokenizerBase

from sorl_trl import qa
from sorl_trl.command_line import given_words, mistakes, parse_dataclasses
from sorl_trl.evaluation.agents import Agent, prompt_rows
from sorl_trl.evaluation.arguments import EvaluationArguments
from sorl_trl.evaluation.batches import complete
from sorl_trl.evaluation.checkpoint import ModelArguments, load_model, load_tokenizer, message_ends
from sorl_trl.evaluation.figures import summarize
from sorl_trl.evaluation.plan import load_datasets, plan_batches, questions_hash
from sorl_trl.evaluation.run_folder import RunFolder
from sorl_trl.evaluation.tables import format_results
from sorl_trl.records.evaluated import FILES, files_hash, read_settings
from sorl_trl.rollout import (
    ChatProtocol,
    Collector,
    EngineOptions,
    EnvironmentResponder,
    Responder,
    RolloutArguments,
    TagProtocol,
    TurnEnd,
    model_engine,
)
from sorl_trl.rollout.environments.bfcl import BFCLEnvironment, are_tasks, check_given, most_messages
from sorl_trl.rollout.protocol import endless_messages
from sorl_trl.search import MalformedResponse, SearchArguments, SearchBackend, SearchUnavailable

logger = logging.getLogger(__name__)

GROUPS = (ModelArguments, RolloutArguments, EngineOptions, EvaluationArguments, SearchArguments)
"""The dataclasses in the order of `Arguments`."""
ABOUT = (
    "sorl evaluate RUN asks a policy questions, scores it, and writes results and trajectories into RUN/evaluation. "
    "RUN is the output folder of `sorl train`, a checkpoint in it, or a PEFT adapter's folder. Its recipe, or that of "
    "--config, says how the policy is asked, and options override it."
)
ALSO_IN_RECIPES = (
    *("max_completion_length", "chat_template_kwargs"),
    *("dtype", "attn_implementation", "trust_remote_code"),
)
"""Arguments of other groups that affect what the policy does and mean the same in training."""
SAMPLING = ("num_samples", "temperature", "top_p", "batch_size", "seed", "rollout_engine", "rejoin_after")
LONGEST_WAIT = timedelta(days=7)
"""How long a finished process waits for the others. By default, process groups give up after minutes."""


@dataclass
class Arguments:
    """The whole command line of one run."""

    model: ModelArguments
    rollout: RolloutArguments
    engine: EngineOptions
    evaluation: EvaluationArguments
    search: SearchArguments
    given: dict[str, Any]
    """The values that recipe and command line set, by name. All others have their defaults."""


def parse_arguments(words: Sequence[str], config: Mapping[str, Any]) -> Arguments:
    """Parse a command line, with the values of its recipe or its file of arguments as defaults."""
    if "train_questions" in config:  # a recipe, whose other arguments are for training
        agent = [field.name for group in (RolloutArguments, EngineOptions, SearchArguments) for field in fields(group)]
        taken = (*agent, *ALSO_IN_RECIPES, "questions", "benchmarks")
        config = {name: value for name, value in config.items() if name in taken}
    parsed = parse_dataclasses(GROUPS, words, config, "sorl evaluate", ABOUT)
    return Arguments(*[*parsed, {**config, **given_words(GROUPS, words)}])


def run_settings(
    arguments: Arguments, datasets: Mapping[str, Sequence[qa.Question]], search_identity: str | None
) -> dict[str, Any]:
    """All that determines the outcome of a run, unlike its output folder or the number of processes."""
    model, evaluation = arguments.model, arguments.evaluation
    path = Path(model.model_name_or_path)
    named = str(path.resolve()) if path.exists() else model.model_name_or_path
    return {
        "model": {**asdict(model), "model_name_or_path": named, FILES: files_hash(named)},
        "rollout": {
            **asdict(arguments.rollout),
            "max_completion_length": evaluation.max_completion_length,
            **({"chat_template_kwargs": told} if (told := evaluation.template_kwargs) else {}),
        },
        "sampling": {name: {**vars(evaluation), **vars(arguments.engine)}[name] for name in SAMPLING},
        "search": search_identity,
        "datasets": {
            name: {"questions": len(questions), "content": questions_hash(questions)}
            for name, questions in datasets.items()
        },
    }


def for_tasks(arguments: Arguments, tasks: Sequence[qa.Question]) -> Arguments:
    """The arguments for tasks of the leaderboard. By default, `max_turns` is the most that the tasks may take.

    Raises ValueError for an argument that was given but has no meaning for tasks.
    """
    check_given(arguments.given)
    given = arguments.rollout.max_turns if "max_turns" in arguments.given else most_messages(tasks)
    return replace(arguments, rollout=replace(arguments.rollout, max_turns=given))


def load_agent(arguments: Arguments, search: SearchBackend | None, device: torch.device) -> Agent:
    """Make the same collector as in training, with a generator that samples from the policy, as trainers do.

    Without `search`, it is for tasks of the leaderboard.
    """
    rollout, checkpoint, told = arguments.rollout, arguments.model, arguments.evaluation.template_kwargs
    tokenizer = tokenizer_for(arguments, of_tasks=search is None)
    with mistakes(_cannot_be_loaded(checkpoint)):
        model = load_model(checkpoint, device)
    with mistakes():
        protocol: TagProtocol
        environment: SearchBackend | Responder
        if search is None:
            protocol = ChatProtocol().in_chat(tokenizer, told)
            environment = EnvironmentResponder(partial(BFCLEnvironment, rollout.is_terse))
        else:
            protocol, environment = rollout.tag_protocol(tokenizer, told), search
        limits = rollout.limits(arguments.evaluation.max_completion_length)
        collector = Collector(tokenizer, environment, protocol, limits, rejoin_after=arguments.engine.rejoin_after)
        end = TurnEnd(tokenizer, protocol.stop_strings, message_ends(model, tokenizer))
        if (rollout.chat or search is None) and (warning := endless_messages(tokenizer, end.eos_token_ids, told)):
            logger.warning(warning)
        kind, gib = arguments.engine.rollout_engine, arguments.engine.kv_cache_gib
        engine = model_engine(model, end, generation_config(arguments.evaluation), kind, kv_cache_gib=gib)
    rows = partial(prompt_rows, rollout=rollout, tokenizer=tokenizer)
    return Agent(collector, engine, rows, told)


def tokenizer_for(arguments: Arguments, of_tasks: bool) -> PreTrainedTokenizerBase:
    """The policy's tokenizer. Raises UserMistake if there is none, or it lacks a chat template that it needs."""
    with mistakes(_cannot_be_loaded(arguments.model)):
        tokenizer = load_tokenizer(arguments.model)
    with mistakes():
        arguments.rollout.check_template(tokenizer, of_tasks)
    return tokenizer


def _cannot_be_loaded(model: ModelArguments) -> str:
    return f"`model_name_or_path` is {model.model_name_or_path!r}, which cannot be loaded"


def generation_config(evaluation: EvaluationArguments) -> GenerationConfig:
    """Greedy or plain sampling, without the penalties and cuts of a checkpoint's own generation config."""
    how: dict[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 50}  # for greedy, what has no meaning there
    if evaluation.temperature:
        how = {"temperature": evaluation.temperature, "top_p": evaluation.top_p, "top_k": 0, "min_p": 0.0}
    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=bool(evaluation.temperature), repetition_penalty=1.0, **how
    )


def report(run: RunFolder) -> tuple[str, int]:
    """Write the results of a finished run; return their table and the number of masked trajectories."""
    settings = read_settings(run.path)
    summaries = {name: summarize(name, run.outcomes(name)) for name in settings["datasets"]}
    table = format_results(list(summaries.values()))
    run.finish({"datasets": summaries, "settings": settings}, table)
    return table, sum(summary["masked"] for summary in summaries.values())


def run_evaluation(arguments: Arguments) -> None:
    """Run what is left of an evaluation, together with other processes if there are any, and report."""
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=LONGEST_WAIT)
    with mistakes(), state.main_process_first():  # so that downloads and indexes are made once
        datasets = load_datasets(arguments.evaluation)
        questions = [question for each in datasets.values() for question in each]
        if are_tasks(questions):
            arguments, search, identity = for_tasks(arguments, questions), None, None
        else:
            if arguments.rollout.chat:
                tokenizer_for(arguments, of_tasks=False)  # before a corpus is indexed
            search, identity = arguments.search.build_search()
        run = RunFolder(arguments.evaluation.output)
        run.claim(run_settings(arguments, datasets, identity))
    batches = plan_batches(datasets, arguments.evaluation.num_samples, arguments.evaluation.batch_size)
    try:
        complete(
            run,
            batches[state.process_index :: state.num_processes],
            lambda: load_agent(arguments, search, state.device),
            arguments.evaluation.seed,
            show_progress=state.is_main_process,
        )
    except (SearchUnavailable, MalformedResponse) as error:
        raise ConnectionError(str(error)) from error  # each process reports it, as others may not have met it
    state.wait_for_everyone()
    masked = 0
    if state.is_main_process:
        table, masked = report(run)
        print(table)
        print(f"Results and trajectories: {run.path}")
    state.destroy_process_group()
    if masked:
        raise SystemExit(
            f"{masked} trajectories were lost because the search engine or the environment was down, and none that "
            "did not ask it, so that the means above are biased: the same command makes what was lost anew."
        )
