"""Does an agent that compacts its history learn to keep what the answer needs?

A policy of two layers is asked for one of three things about each of two persons. It looks up one after the other, but
both records do not fit into its window. The agent of `examples/compacting_agent.py` has it sum up what it read; in the
control, the agent drops its oldest messages. All runs start from a policy that has imitated both, and often keeps the
first thing of a record, whatever is asked. Before and after 24 rollouts of 64 trajectories, sampled, on 100 held-out
questions: the shares of first and second answers that are right, where no agent failed, and of what the summary kept.
`python -m benchmarks.compacting` makes every run that is not there yet, in about 95 CPU-seconds a seed.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from functools import cache, partial
from itertools import chain, product, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from examples.compacting_agent import KNOWN, SUM_UP, TASK, solve, sum_up
from examples.quickstart import imitation
from openai import AsyncOpenAI
from transformers import AutoTokenizer

from benchmarks.common import QUIET, RESULTS, Row, read_rows, table, write_rows
from benchmarks.worlds.invented import invented_words
from sorl_trl import EndpointRollout, SOGRPOConfig, SOGRPOTrainer, agent_reward

FILE, WARM_START = RESULTS / "compacting.json", Path("runs/compacting/warm-start")
WINDOW, LONGEST, FIRST = 60, 160, 0.4  # tokens to read, characters of a history, share of first things kept
NAMES, KINDS = invented_words()[:60], {"eats": "food", "keeps": "pet", "does": "job"}
THINGS = {kind: invented_words()[60 + 20 * i : 80 + 20 * i] for i, kind in enumerate(KINDS.values())}
OPTIONS: Row = {
    **{"learning_rate": 1e-3, "lr_scheduler_type": "constant", "max_completion_length": 400, "num_generations": 8},
    **{"per_device_train_batch_size": 16, "steps_per_generation": 4, "num_iterations": 2, "max_steps": 24 * 8},
    **{"eval_on_start": True, "num_generations_eval": 1, "per_device_eval_batch_size": 100, "logging_steps": 1},
    **{"reward_weights": [1.0, 0.0], "gradient_checkpointing": False, **QUIET},
}


def questions(count: int, seed: str) -> list[Row]:
    """Each with the records of two persons, and the two things that it asks for."""
    rng, rows = random.Random(f"compacting/{seed}"), list[Row]()
    for _ in range(count):
        asked, names = rng.choice([*KINDS]), rng.sample(NAMES, 2)
        things = [{kind: rng.choice(words) for kind, words in THINGS.items()} for _ in names]
        shuffled = [rng.sample([*each.items()], len(each)) for each in things]
        records = [" ".join([name, *chain(*each)]) for name, each in zip(names, shuffled, strict=True)]
        answers = [each[KINDS[asked]] for each in things]
        rows.append({"prompt": f"{asked} {' '.join(names)}", "records": records, "answers": answers})
    return rows


async def drop_oldest(messages: list[Any], say: Any) -> list[Any]:
    return [*messages[:2], *messages[-2:]]


ARMS = {"summary": sum_up, "truncation": drop_oldest}
shared = cache(partial(AsyncOpenAI, base_url="http://127.0.0.1:1/v1", api_key="none"))


async def agent(row: Row, endpoint: Any, arm: str) -> dict[str, float]:
    """Which things the answer has right. The player's client may take the endpoint's place."""
    records = {each.split()[0]: each for each in row["records"]}
    client = endpoint if hasattr(endpoint, "chat") else shared().with_options(**vars(endpoint))
    said = await solve(row["prompt"], lambda query: records.get(query, "nothing"), client, LONGEST, ARMS[arm])
    pairs = zip_longest(("first", "second"), (said or "").split()[:2], row["answers"])
    return {name: float(one == other) for name, one, other in pairs}


def kept(trajectory: list[Any], answers: list[list[str]], **_: Any) -> list[float]:
    """The share of the things that the last summary has."""
    last = [[turn.text for turn in each.turns if turn.agent == "summary"][-1:] for each in trajectory]
    return [sum(thing in "".join(said) for thing in things) / 2 for said, things in zip(last, answers, strict=True)]


def scripted(rng: random.Random, is_summary: bool, task: str, known: str, *others: str) -> str:
    (asked, *names), words = (each.rpartition(" : ")[2].split() for each in (task, known))
    have = dict(zip(words[::2], words[1::2], strict=False))
    for name, *words in (each.split() for each in others if each.split()[0] in names):
        have[name] = words[1 if is_summary and rng.random() < FIRST else words.index(KINDS[asked]) + 1]
    if is_summary:
        return " ".join(f"{name} {thing}" for name, thing in have.items() if name in names)
    if names[1] in have:
        return f"<answer> {have.get(names[0], 'nothing')} {have[names[1]]} </answer>"
    return f"<search> {names[names[0] in have]} </search>"


async def teach() -> None:
    """Write the warm start, which imitates the player."""
    words = [*NAMES, *chain(*THINGS.values()), *KINDS, *KINDS.values(), "nothing Write a search or an answer ."]
    texts = [TASK, KNOWN, SUM_UP, "system user assistant", *words]
    tokenizer = imitation.word_tokenizer(texts, ["<search>", "</search>", "<answer>", "</answer>"])
    shown = "{% for m in messages %}{{ m.role }} {{ m.content | trim }} [EOS] {% endfor %}"
    tokenizer.chat_template = shown + "{% if add_generation_prompt %}assistant {% endif %}"
    rng, examples = random.Random("compacting/player"), list[imitation.Example]()

    async def create(model: str, messages: list[Any]) -> Any:
        said = scripted(rng, model == "summary", *(each["content"] for each in messages))
        message = {"role": "assistant", "content": said}
        if len(messages) > 2 or said.startswith("<answer>"):  # or else the next call goes on from there
            text = tokenizer.apply_chat_template([*messages, message], tokenize=False)
            parts = [*map(tokenizer.tokenize, re.split(r"(?<=assistant )(.*?\[EOS\])", text))]
            mask = [place % 2 for place, part in enumerate(parts) for _ in part]
            examples.append(imitation.example_of((), tokenizer.convert_tokens_to_ids([*chain(*parts)]), mask))
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(**message))])

    player = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    for row, arm in [(row, each) for each in ARMS for row in questions(2000, f"practice/{each}")]:
        await agent(row, player, arm)
    policy = imitation.make_policy(tokenizer, imitation.PolicyConfig(96, 2, 4), 0, WINDOW)
    imitation.imitate(policy, examples, 1500, 16, 3e-3, 0)
    imitation.store_policy(policy, tokenizer, WARM_START)


def run(seed: int, arm: str) -> Row:
    started, args = time.process_time(), SOGRPOConfig("runs/compacting", seed=seed, **OPTIONS)
    sets = [Dataset.from_list(questions(*each)) for each in ((1000, f"train/{seed}"), (100, "held out"))]
    tokenizer, rollout = AutoTokenizer.from_pretrained(WARM_START), EndpointRollout(partial(agent, arm=arm), 12)
    more: Row = {"processing_class": tokenizer, "rollout_func": rollout}
    trainer = SOGRPOTrainer(str(WARM_START), [agent_reward, kept], args, *sets, **more)
    trainer.train()
    trainer.evaluate()
    log = trainer.state.log_history
    names = {"first": "eval_agent/first", "second": "eval_agent/second", "kept": "eval_rewards/kept/mean"}
    scores = {each: [round(entry[name], 3) for entry in log if name in entry] for each, name in names.items()}
    return {"seed": seed, "arm": arm, **scores, "seconds": round(time.process_time() - started)}


def main() -> None:
    torch.set_num_threads(1)
    if not WARM_START.is_dir():
        asyncio.run(teach())
    rows = read_rows(FILE)
    for job in product((1, 2, 3), ARMS):
        if job not in {(row["seed"], row["arm"]) for row in rows}:
            rows.append(run(*job))
            write_rows(rows, FILE)
    names = ("history", "seed", "first before", "after", "second before", "after", "kept before", "after", "CPU-s")
    lines = [[row["arm"], row["seed"], *row["first"], *row["second"], *row["kept"], row["seconds"]] for row in rows]
    FILE.with_suffix(".md").write_text(f"# {__doc__}\n{table(names, [[*map(str, each)] for each in lines], left=1)}")


if __name__ == "__main__":
    main()
