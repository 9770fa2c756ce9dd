"""Writes the quickstart's atlas, and teaches a chat model to call an agent's search tool, here `langgraph_agent.py`'s.

The model learns from an expert that often answers after too few searches.

python -m examples.tool_imitation models/smollm2-135m runs/langgraph
"""

import json
import re
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.quickstart import World, WorldSize, build_atlas, example_of, imitate
from examples.quickstart.expert import ExpertNoise, Hasty
from sorl_trl import EndpointRollout
from sorl_trl.qa import Question
from sorl_trl.rollout import LockStepEngine, RolloutLimits
from sorl_trl.rollout.chat import RolloutSetup, chatml_tools

HASTE = ExpertNoise(missing_keyword=0.0, wrong_keyword=0.0, half_name=0.0, early_answer=0.4)
"""On four of ten questions that need two searches, the expert searches only once."""
QUESTION = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>")

RESULT = re.compile(r"<tool_response>\n(.*?)\n.*?</tool_response>", re.DOTALL)
"""Of which the expert reads the first passage."""


class CallingExpert(Hasty):
    """The quickstart's hasty expert, which calls a tool instead of writing tags."""

    def __init__(self, tokenizer, world: World, seed: int) -> None:
        super().__init__(tokenizer, world.relations, {}, HASTE, seed)
        self.questions = {each.question: each for each in world.train}

    def _read(self, context) -> tuple[Question, str]:
        text = self._tokenizer.decode(context)
        text = RESULT.sub(r"<information>\1</information>", text)
        return self.questions[QUESTION.search(text)[1]], text

    def _turn(self, question: Question, text: str) -> str:
        tag, said = re.fullmatch(r"<(\w+)> (.*) </\w+>", super()._turn(question, text)).groups()
        if tag == "search":
            call = {"name": "search", "arguments": {"query": said}}
            said = f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
        return said + self._tokenizer.eos_token


def conversations(agent, tokenizer, world: World, number: int, seed: int):
    """What the agent's API calls make the policy read and write if the expert answers them."""
    setup = RolloutSetup(tokenizer, None, {}, [tokenizer.eos_token_id], RolloutLimits(sys.maxsize, 64, 512, 512))
    rows = [vars(each) for each in world.train[:number]]
    engine = LockStepEngine(CallingExpert(tokenizer, world, seed))
    prompts = [each["question"] for each in rows]
    made, metrics = EndpointRollout(agent).collect(setup, prompts, rows, engine)
    print({name: round(value, 3) for name, value in metrics.items() if name.startswith("endpoint/")})
    print(f"The expert is right in {sum(each.columns['agent_rewards']['reward'] for each in made)} of {number}")
    return [example_of(each.prompt_ids, each.completion_ids, each.env_mask) for each in made]


def main(name: str, folder: Path, agent, examples: int = 192, batch_size: int = 8, seed: int = 0) -> None:
    """Write `world` and `warm-start` into the folder. The agent must search in the folder's `practice`."""
    tokenizer = chatml_tools(AutoTokenizer.from_pretrained(name))
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    size = WorldSize(evaluation_questions=100)
    build_atlas(seed, size, plain=True).write(folder / "world")
    practice = build_atlas(seed + 1, size, shuffled=True, plain=True)  # the same names, but other facts
    practice.write(folder / "practice")
    taught = conversations(agent, tokenizer, practice, examples, seed)
    steps = examples // batch_size  # each example once, about
    imitate(model, taught, steps, batch_size, learning_rate=5e-5, seed=seed, warmup_steps=2, stratified=True)
    model.save_pretrained(folder / "warm-start")
    tokenizer.save_pretrained(folder / "warm-start")


if __name__ == "__main__":
    from examples import langgraph_agent

    langgraph_agent.CORPUS = f"{sys.argv[2]}/practice/corpus.jsonl"
    main(sys.argv[1], Path(sys.argv[2]), langgraph_agent.agent)
