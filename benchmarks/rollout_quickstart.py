"""The rollout of a quickstart that has run: its warm-started policy, its questions and its search engine."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from sorl_trl import qa
from sorl_trl.command_line import UserMistake
from sorl_trl.rollout import Collector, Engine, HFGenerator, LockStepEngine, SlotEngine, TurnEnd
from sorl_trl.sandbox import CORPUS_FILE, PROMPT_TEMPLATE, PROTOCOL, THINKING_LIMITS, TRAIN_FILE
from sorl_trl.search import BM25Index

QUESTIONS, GENERATIONS = 16, 8
"""As in the recipe: 128 trajectories."""
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


def measure_quickstart(folder: Path, rounds: int) -> dict[str, Any]:
    """Processor and wall time of either engine: medians over rounds in turn, after one that does not count."""
    torch.set_num_threads(1)
    rollout = Rollout(folder)
    seconds: dict[str, list[tuple[float, float]]] = {"lockstep": [], "slots_event": []}
    for round_ in range(rounds + 1):
        for name in sorted(seconds, reverse=round_ % 2 == 1):
            seconds[name].append(rollout.seconds(name))
    figures = {
        name: {
            "cpu_seconds": statistics.median(cpu for cpu, _ in measured[1:]),
            "wall_seconds": statistics.median(wall for _, wall in measured[1:]),
        }
        for name, measured in seconds.items()
    }
    ratio = figures["lockstep"]["cpu_seconds"] / figures["slots_event"]["cpu_seconds"]
    return {**figures, "cpu_ratio": ratio, "rows": QUESTIONS * GENERATIONS, "rounds": rounds}


class Rollout:
    """A rollout of the quickstart, by either engine. Raises UserMistake for a folder that holds no quickstart."""

    def __init__(self, folder: Path) -> None:
        index = folder / "world" / f"{CORPUS_FILE}.index"
        if not index.is_dir() or not (folder / "warm-start").is_dir():
            raise UserMistake(f"--quickstart {folder} holds no quickstart: `python quickstart.py --output` writes one")
        self._model = AutoModelForCausalLM.from_pretrained(folder / "warm-start").eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder / "warm-start")
        search = BM25Index.load(index)
        # As in its recipe.
        self._collector = Collector(self._tokenizer, search, PROTOCOL, THINKING_LIMITS, rejoin_after=0)
        questions = qa.load_questions(folder / "world" / TRAIN_FILE)[:QUESTIONS]
        prompts = [self._tokenizer(PROMPT_TEMPLATE.format(question=each.question)).input_ids for each in questions]
        self._prompts = [prompt for prompt in prompts for _ in range(GENERATIONS)]

    def seconds(self, engine: str) -> tuple[float, float]:
        """Of processor and wall time."""
        torch.manual_seed(0)
        built = self._engine(engine)
        cpu, wall = time.process_time(), time.perf_counter()
        with torch.no_grad():
            self._collector.collect(self._prompts, built)
        return time.process_time() - cpu, time.perf_counter() - wall

    def _engine(self, name: str) -> Engine:
        config = GenerationConfig(**SAMPLED)  # type: ignore[no-untyped-call]
        stops, ends = PROTOCOL.stop_strings, [self._tokenizer.eos_token_id]
        if name == "lockstep":
            return LockStepEngine(HFGenerator(self._model, self._tokenizer, stops, config, ends))
        return SlotEngine(self._model, TurnEnd(self._tokenizer, stops, ends), config)
