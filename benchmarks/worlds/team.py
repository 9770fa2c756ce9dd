"""A world for several agents: questions that a verifier, a searcher and an answerer answer, as turns of one policy."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from datasets import Dataset
from examples.quickstart import (
    EVALUATION_FILE,
    TRAIN_FILE,
    Example,
    ExpertNoise,
    PolicyConfig,
    ScriptedExpert,
    World,
    WorldSize,
    example_of,
    imitate,
    make_policy,
    store_policy,
    train_tokenizer,
)
from examples.quickstart.expert import UNKNOWN
from examples.search_team import TURNS, SearchTeam
from tokenizers import AddedToken
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.worlds.invented import build_invented
from benchmarks.worlds.questions import EVALUATION_QUESTIONS, PRACTICE_WORLDS, TRAIN_QUESTIONS, Score, SearchWorld
from sorl_trl import AgentRollout, qa
from sorl_trl.agents.chat import RolloutSetup
from sorl_trl.rollout import ChatProtocol, EnvironmentResponder, RolloutLimits, TurnEnd, model_engine
from sorl_trl.rollout.engine import LockStepEngine
from sorl_trl.search import BM25Index

PROMPT = "question : {question}"
TEMPLATE = "{% for m in messages %}{{ m.content + (' [EOS] ' if m.role == 'assistant' else ' ') }}{% endfor %}"
WORDS = "verifier searcher answerer : yes no nothing question"
FINDS = ExpertNoise(missing_keyword=0.15, wrong_keyword=0.15, half_name=0.1)
SURE, SLIP = 0.6, 0.2
"""How often the verifier says yes after a search that was not the last, and how often it errs otherwise."""
WRONG_ANSWER = 0.1
LIMITS = RolloutLimits(TURNS, max_turn_tokens=10, max_observation_tokens=24, max_trajectory_tokens=160)


class TerseTeam(SearchTeam):
    """The team of the example, with few words between its turns."""

    named = " {agent} :"
    top_k = 1


class ScriptedTeam(ScriptedExpert):
    """What the policy imitates: a team in which each agent errs, the verifier more often than not after one search."""

    def _turn(self, question: qa.Question, text: str) -> str:
        found = re.findall(r"</search> \[EOS\] (.*?) (?:verifier|answerer) :", text)
        name = self._found(found[-1])[1] if found else question.metadata["subject"]
        relations = question.metadata["relations"]
        is_done = len(found) >= len(relations) or name == UNKNOWN
        agent = (text.split() or ["verifier", ":"])[-2]
        if agent == "verifier":
            errs = self._rng.random() < (SURE if found and not is_done else SLIP)
            return f"<verify> {'yes' if is_done != errs else 'no'} </verify> [EOS]"
        if agent == "answerer":
            return f"<answer> {UNKNOWN if self._rng.random() < WRONG_ANSWER else name} </answer> [EOS]"
        asked = relations[len(found)] if len(found) < len(relations) else self._rng.choice([*self._relations])
        return f"<search> {self._query(name, self._relations[asked])[0]} </search> [EOS]"


def rollout_in(world: Path, limits: RolloutLimits) -> AgentRollout:
    """Of the team in a world that was written."""
    team = partial(TerseTeam, BM25Index.load(world / "index"))
    return AgentRollout(EnvironmentResponder(team), ChatProtocol(), limits)


def rows_of(questions: Sequence[qa.Question]) -> list[dict[str, Any]]:
    return qa.build_prompt_rows(questions, PROMPT, conversational=True)


@dataclass(frozen=True)
class TeamWorld(SearchWorld):
    """One world to train in, another to be judged in, and a policy that has imitated a team in eight more."""

    title: str = "Search team"
    description: str = "one hop or two, three agents"
    limits: RolloutLimits = LIMITS
    steps: int = 1000
    """Of imitation."""

    @property
    def most_turns(self) -> int:
        return TURNS

    @property
    def name(self) -> str:
        return "team"

    @property
    def settings(self) -> tuple[object, ...]:
        return self.limits, self.steps, FINDS, SURE, SLIP, WRONG_ANSWER

    def build(self, seed: int, target: Path, cache: Path) -> Path:
        size = WorldSize(TRAIN_QUESTIONS, EVALUATION_QUESTIONS)
        world, unseen, *practice = (build_invented(1000 * seed + i, size=size) for i in range(2 + PRACTICE_WORLDS))
        self.write({"train": world, "unseen": unseen}, target)
        tokenizer = train_tokenizer([world, *practice], [WORDS])
        tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<verify>", "</verify>")])
        tokenizer.chat_template = TEMPLATE
        policy = make_policy(tokenizer, PolicyConfig(), seed, positions=256)
        examples = [each for part in practice for each in self._imitated(part, tokenizer, seed)]
        imitate(policy, examples, self.steps, batch_size=16, learning_rate=3e-3, seed=seed)
        return store_policy(policy, tokenizer, cache / f"{self.name}-{seed}")

    def _imitated(self, world: World, tokenizer: PreTrainedTokenizerBase, seed: int) -> list[Example]:
        """The scripted team's trajectories."""
        rows, setup = rows_of(world.train), self._setup(tokenizer)
        prompts = [row["prompt"] for row in rows]
        begun = [[{**prompt[0], "content": f"{prompt[0]['content']} verifier :"}] for prompt in prompts]
        known = dict(zip(map(tuple, setup.encode(begun)), world.train, strict=True))
        team = ScriptedTeam(tokenizer, world.relations, known, FINDS, seed)
        with TemporaryDirectory() as folder:
            self.write({"part": world}, Path(folder))
            rollout = rollout_in(Path(folder, "part"), self.limits)
            output, _ = rollout.collect(setup, prompts, rows, LockStepEngine(team))
        columns = (output[name] for name in ("prompt_ids", "completion_ids", "env_mask"))
        return [example_of(*each) for each in zip(*columns, strict=True)]

    def _setup(self, tokenizer: Any) -> RolloutSetup:
        return RolloutSetup(tokenizer, None, {}, [tokenizer.eos_token_id], self.limits)

    def trainer_arguments(self, folder: Path) -> dict[str, Any]:
        questions = qa.load_questions(folder / "train" / TRAIN_FILE)
        return {
            "reward_funcs": qa.solved_reward,
            "train_dataset": Dataset.from_list(rows_of(questions)),
            "rollout_func": rollout_in(folder / "train", self.limits),
        }

    def examination(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> Score:
        rows = rows_of(qa.load_questions(folder / "unseen" / EVALUATION_FILE))
        prompts, rollout = [row["prompt"] for row in rows], rollout_in(folder / "unseen", self.limits)
        setup = self._setup(tokenizer)
        end = TurnEnd(tokenizer, (), setup.eos_token_ids)

        def score(model: PreTrainedModel, config: GenerationConfig) -> float:
            output, _ = rollout.collect(setup, prompts, rows, model_engine(model, end, config))
            return statistics.fmean(team.solved for team in output["environments"])

        return score
