"""Three agents that share a policy: a verifier decides whether to search, a searcher searches, an answerer answers.

python quickstart.py  # writes the default questions and corpus
python examples/search_team.py --model Qwen/Qwen2.5-0.5B-Instruct --output_dir out
"""

import re
from dataclasses import dataclass
from functools import partial

from datasets import Dataset
from trl import TrlParser

from sorl_trl import AgentRollout, SOGRPOConfig, SOGRPOTrainer
from sorl_trl.qa import build_prompt_rows, exact_match, load_questions, solved_reward
from sorl_trl.rollout import ChatProtocol, Reply, RolloutLimits
from sorl_trl.search import BM25Index
from sorl_trl.types import StopReason

PROMPT = """You are a team that answers a question. The verifier says whether enough is known to answer it, as
<verify>yes</verify> or <verify>no</verify>. The searcher writes <search>what to look up</search>, and the answerer
<answer>a few words</answer>. Write what the agent writes that is named.
Question: {question}"""
STEPS = 4  # of the environment: in each, the team searches or answers; in the last, it can only answer
TURNS = 2 * (STEPS - 1) + 1


@dataclass
class Arguments:
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    questions: str = "runs/quickstart/world/train.jsonl"
    corpus: str = "runs/quickstart/world/corpus.jsonl"
    index: str = "runs/index"


class SearchTeam:
    named = "\nYou are the {agent}."  # what an agent reads before its turn
    top_k = 3

    def __init__(self, index):
        self.index = index

    def reset(self, golden_answers):
        self.golden_answers, self.searches, self.solved = golden_answers, 0, False
        return self.call("verifier")

    def step(self, turn):
        said = {tag: text.strip() for tag, text in re.findall(r"<(\w+)>(.*?)</\1>", turn.action.content, re.DOTALL)}
        if self.agent == "verifier":  # whatever does not say no says yes
            return Reply(self.call("searcher" if said.get("verify") == "no" else "answerer"), role="user")
        if self.agent == "answerer":
            self.solved = bool(exact_match(said.get("answer"), self.golden_answers))
            return Reply(stop=StopReason.ENVIRONMENT_DONE)
        self.searches += 1
        passages = self.index.search_batch([said["search"]], self.top_k)[0] if said.get("search") else []
        found = "\n".join(passage.text for passage in passages) or "nothing"
        return Reply(found + self.call("verifier" if self.searches < STEPS - 1 else "answerer"), role="user")

    def call(self, agent):
        self.agent = agent  # whose turn is next
        return self.named.format(agent=agent)


if __name__ == "__main__":
    parser = TrlParser((Arguments, SOGRPOConfig))
    parser.set_defaults(output_dir="out", max_completion_length=2500, steps_per_generation=8)
    arguments, config = parser.parse_args_and_config()
    rows = Dataset.from_list(build_prompt_rows(load_questions(arguments.questions), PROMPT, conversational=True))
    team = partial(SearchTeam, BM25Index.open(arguments.corpus, arguments.index))
    rollout = AgentRollout(team, ChatProtocol(), RolloutLimits(max_turns=TURNS))
    trainer = SOGRPOTrainer(arguments.model, solved_reward, config, rows, method="dr_mas", rollout_func=rollout)
    trainer.train()
    trainer.save_model()
