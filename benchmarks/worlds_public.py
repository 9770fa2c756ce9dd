"""Does a language model get better in worlds that nobody here wrote?

SmolLM2-135M-Instruct plays FrozenLake of TextArena (4 × 4, three holes, from any corner) and cooking games of
TextWorld. It imitates a few games of a scripted player, and is then trained with `sorl train` and the default method.

    make model .venv-worlds/.installed  # the worlds' packages are in an environment of their own
    .venv-worlds/bin/python -m benchmarks.worlds_public           # every run that is not there yet
    .venv-worlds/bin/python -m benchmarks.worlds_public --report  # only writes the report again

Each run adds a line to `results/worlds.jsonl`. A run that is there is not made again, and one that was interrupted
goes on from its last checkpoint. All seeds of a world share its warm start, which stays in `runs/worlds_public/`.
Several starts may work side by side.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml
from examples.quickstart.imitation import Example, example_of, imitate
from examples.worlds.players import step_to_goal, walkthrough
from examples.worlds.textarena_game import TextArenaGame
from examples.worlds.textarena_game import rows as lake_rows
from examples.worlds.textworld_game import TextWorldGame
from examples.worlds.textworld_game import rows as cooking_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import ALLOCATION, MIXED, QUIET, RESULTS, Row, alone, claim, locked, read_lines, sorl, table
from benchmarks.stability_report import with_error
from sorl_trl import AgentRollout
from sorl_trl.command_line import Parser, run_command
from sorl_trl.files import write_whole
from sorl_trl.records import RECIPE_FILE
from sorl_trl.records.evaluated import read_evaluated
from sorl_trl.rollout import Generation, LockStepEngine, RolloutLimits
from sorl_trl.rollout.chat import RolloutSetup

RUNS = Path("runs/worlds_public")
SEEDS = (1, 2, 3)
TRAIN, HELD_OUT = 1000, 9000
"""The first seeds of games that are trained on and of those that are held out. Imitated games count from 0."""
MODES = {"sampled": 1, "greedy": 0}
"""How an evaluation asks the policy -> its temperature."""
OPTIONS: Row = {
    **{"rewards": ["environment"], "max_turns": 8, "max_turn_tokens": 16, "max_observation_tokens": 1000},
    **{"max_completion_length": 4000, "num_generations": 8, "per_device_train_batch_size": 1},
    **{"gradient_accumulation_steps": 4, "steps_per_generation": 16, "learning_rate": 1e-5, "logging_steps": 1},
    **{"gradient_checkpointing": False, "kv_cache_gib": 1, "dtype": "float32", **QUIET, "bf16": True},
    **{"save_strategy": "steps", "save_steps": 8, "save_total_limit": 1},
}
"""Sizes, and twice the learning rate of `recipes/smollm2_search.yaml`; all else is the default. A rollout has two
groups and serves four updates."""
Player = Callable[[str], str]
"""What a scripted player says to a text, which ends with what it has read last."""


@dataclass(frozen=True)
class Scale:
    """How much is played; a batch has four imitated games, and an update four trajectories."""

    imitated: int = 48
    batches: int = 12
    held_out: int = 48
    updates: int = 48


def cook(row: Row) -> Player:
    """Says the commands that TextWorld says win the game."""
    commands = iter(walkthrough(row["game"]))
    return lambda _: next(commands)


@dataclass(frozen=True)
class World:
    title: str
    environment: type
    rows: Callable[..., list[Row]]
    """`count` games, from the seed `first` on."""
    player: Callable[[Row], Player]
    lessons: int = 1
    """How many times the games and batches of the scale it imitates."""


LAKE = partial(lake_rows, "FrozenLake-v0-random")
COOKING = partial(cooking_rows, "tw-cooking", folder=str(RUNS / "games"))
WORLDS = {
    "cooking": World("Cooking (TextWorld)", TextWorldGame, COOKING, cook),
    "lake": World("FrozenLake (TextArena)", TextArenaGame, LAKE, lambda _: step_to_goal, lessons=4),
}


class Scripted:
    """Generates what a scripted player says."""

    def __init__(self, say: Player, tokenizer: Any) -> None:
        self.say, self.tokenizer = say, tokenizer

    def generate(self, contexts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> list[Generation]:
        texts = [self.say(self.tokenizer.decode(ids)) + self.tokenizer.eos_token for ids in contexts]
        ids = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return [Generation(tuple(each), None, stopped=True) for each in ids]


def imitated(world: World, rows: Sequence[Row], tokenizer: Any) -> Iterator[Example]:
    """Games that the scripted player wins, as the policy would read and write them."""
    limits = RolloutLimits(OPTIONS["max_turns"], max_observation_tokens=OPTIONS["max_observation_tokens"])
    setup = RolloutSetup(tokenizer, None, {}, [tokenizer.eos_token_id], limits)
    rollout = AgentRollout(world.environment, limits=limits)
    for row in rows:
        engine = LockStepEngine(Scripted(world.player(row), tokenizer))
        ((made,), metrics) = rollout.collect(setup, [row["prompt"]], [row], engine)
        if not metrics["environment/solved"]:
            raise RuntimeError(f"the scripted player loses {row}")
        yield example_of(made.prompt_ids, made.completion_ids, made.env_mask)


def teach(model: str, name: str, scale: Scale, folder: Path) -> None:
    """Write the warm start."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    world = WORLDS[name]
    games = [*imitated(world, world.rows(scale.imitated * world.lessons), tokenizer)]
    how = (scale.batches * world.lessons, 4, 1e-4, 0)  # steps, examples in a batch, learning rate, seed
    with MIXED:
        imitate(policy, games, *how, warmup_steps=2, stratified=True)
    policy.save_pretrained(folder / "warm-start")
    tokenizer.save_pretrained(folder / "warm-start")


def success(folder: Path, policy: Path, output: Path) -> dict[str, float]:
    """The share of held-out games that a policy wins, sampled and greedy."""
    found = {}
    for mode, temperature in MODES.items():
        asked = ("--model_name_or_path", policy, "--temperature", temperature, "--batch_size", 48, "--kv_cache_gib", 3)
        shutil.rmtree(output / mode, ignore_errors=True)  # of a run that was interrupted
        sorl(folder, "evaluate", folder, *asked, "--output", output / mode)
        found[mode] = round(fmean(row["correct"] for row in read_evaluated(output / mode, "held_out")), 3)
    return found


def prepare(name: str, scale: Scale, model: str, runs: Path) -> Row:
    """Write games, recipe and warm start of a world, once; what rows record of them."""
    folder, world = runs / name, WORLDS[name]
    if (folder / "prepared.json").is_file():
        return dict(json.loads((folder / "prepared.json").read_text()))
    folder.mkdir(parents=True, exist_ok=True)
    for file, count, first in (("train", scale.updates, TRAIN), ("held_out", scale.held_out, HELD_OUT)):
        lines = map(json.dumps, world.rows(count, first=first))
        (folder / f"{file}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    recipe = {"environment": f"{world.environment.__module__}.{world.environment.__name__}"}
    recipe |= {"max_steps": scale.updates}
    recipe |= {"train_questions": f"{folder}/train.jsonl", "eval_questions": f"{folder}/held_out.jsonl"}
    (folder / RECIPE_FILE).write_text(yaml.safe_dump(OPTIONS | recipe))
    alone({}, teach, model, name, scale, folder)
    before = success(folder, folder / "warm-start", folder / "before")
    lessons = {name: world.lessons * getattr(scale, name) for name in ("imitated", "batches")}
    prepared = {**vars(scale), **lessons, "before": before}
    (folder / "prepared.json").write_text(json.dumps(prepared))
    return prepared


def run(name: str, seed: int, prepared: Row, runs: Path) -> Row:
    """Train and evaluate with a seed, and make the row."""
    folder, output = runs / name, runs / name / f"seed-{seed}"
    words = ("--config", folder / RECIPE_FILE, "--model_name_or_path", folder / "warm-start", "--output_dir", output)
    if any(output.glob("checkpoint-*")):
        words += ("--resume_from_checkpoint", "latest")
    before = os.times()
    sorl(folder, "train", *words, "--seed", seed)
    after = success(folder, output, output)
    minutes = round((sum(os.times()[2:4]) - sum(before[2:4])) / 60, 1)  # of processes that have ended
    log = json.loads((output / "trainer_state.json").read_text())["log_history"]
    shutil.rmtree(output)
    rewards = [round(step["reward"], 4) for step in log if "reward" in step]
    return {"world": name, "seed": seed, **prepared, "after": after, "rewards": rewards, "minutes": minutes}


def read(file: Path) -> dict[tuple[str, int], Row]:
    return {(row["world"], row["seed"]): row for row in read_lines(file)}


HEADER = f"""# Worlds that others wrote

`python -m benchmarks.worlds_public`: SmolLM2-135M-Instruct after a warm start of a scripted player's games, before and
after training with the default method and the learning rate {OPTIONS["learning_rate"]:g}, in mixed precision, four
trajectories an update. A figure is the share of held-out games that it wins, and its standard error is up to .07. All
seeds of a world share the warm start. CPU-minutes are those of training and evaluation since a run was last resumed.

FrozenLake rewards the share of the way to the goal, also of those who fall in: training raises neither that nor the
share of games that are won, four of 48 before it.

Each warm start was made twice. After 96 games of cooking instead of 48, it hardly varied (.73 sampled, .75 greedy),
and 24 updates of seed 1 led to .67; after 48 games on the ice instead of 192, it won none of 48, sampled or greedy."""
COLUMNS = {
    **{"seed": "seed", "imitated": "games imitated", "updates": "updates", "held_out": "games held out"},
    "minutes": "CPU-minutes",
}


def report(rows: Sequence[Row]) -> str:
    """What the seeds of each world gained, and then each run."""
    lines, gains = [], []
    for name, world in WORLDS.items():
        runs = sorted((row for row in rows if row["world"] == name), key=lambda row: row["seed"])
        lines += [[world.title, *_cells(row)] for row in runs]
        if len(runs) > 1:
            changes = [[row["after"][mode] - row["before"][mode] for row in runs] for mode in MODES]
            gains.append([world.title, *map(with_error, changes)])
    names = ("world", *COLUMNS.values(), *(f"{mode}, {when}" for mode in MODES for when in ("before", "after")))
    parts = [HEADER, table(("gained, mean ± standard error over seeds", *MODES), gains, 1)] if gains else [HEADER]
    return "\n\n".join(part.strip() for part in [*parts, table(names, lines, 1)]) + "\n"


def _cells(row: Row) -> list[str]:
    shares = [row[when][mode] for mode in MODES for when in ("before", "after")]
    return [*(str(row[name]) for name in COLUMNS), *(f"{share:.3f}" for share in shares)]


def main(words: Sequence[str]) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="models/smollm2-135m", help="folder that `make model` wrote")
    parser.add_argument("--trial", type=Path, metavar="DIR", help="a tiny run of each world, which leaves no row here")
    parser.add_argument("--report", action="store_true", help="only write the report again")
    arguments = parser.parse_args(words)
    os.environ.update(ALLOCATION, OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")  # for what is started from here
    runs, file = arguments.trial or RUNS, (arguments.trial or RESULTS) / "worlds.jsonl"
    scale, seeds = (Scale(4, 1, 4, 4), SEEDS[:1]) if arguments.trial else (Scale(), SEEDS)
    runs.mkdir(parents=True, exist_ok=True)
    lock = runs / "lock"
    for name, seed in [] if arguments.report else [(name, seed) for seed in seeds for name in WORLDS]:
        if (name, seed) in read(file) or not claim(runs / f"{name}-{seed}.claim", lock):
            continue
        with locked(runs / f"{name}.lock"):
            prepared = prepare(name, scale, arguments.model, runs)
        row = run(name, seed, prepared, runs)
        with locked(lock):
            rows = [*read(file).values(), row]
            write_whole(file, "".join(json.dumps(row) + "\n" for row in rows).encode())
        print(f"{name}, seed {seed} is done: {len(rows)} rows in {file}", flush=True)
    file.with_suffix(".md").write_text(report([*read(file).values()]))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(run_command(main))
