"""An agent that compacts its history: when it grows too long, the policy sums it up, and goes on from its summary.

python quickstart.py  # writes the default questions and corpus
python examples/compacting_agent.py --model Qwen/Qwen2.5-0.5B-Instruct --output_dir out
"""

import re
from dataclasses import dataclass

from datasets import Dataset
from openai import AsyncOpenAI
from trl import TrlParser

from sorl_trl import EndpointRollout, SOGRPOConfig, SOGRPOTrainer, agent_reward
from sorl_trl.qa import exact_match, load_questions
from sorl_trl.search import BM25Index

TASK = "Write <search> what to look up </search> or <answer> a few words </answer> .\nQuestion : {question}"
KNOWN = "Known so far : {known}"
SUM_UP = "Sum up what the answer needs ."


@dataclass
class Arguments:
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    questions: str = "runs/quickstart/world/train.jsonl"
    corpus: str = "runs/quickstart/world/corpus.jsonl"
    index: str = "runs/index"
    longest: int = 1500  # the most characters of a history


async def sum_up(messages, say):
    """The task, and the policy's summary in place of all other messages."""
    summary = await say("summary", [*messages, {"role": "user", "content": SUM_UP}])
    return [messages[0], {"role": "user", "content": KNOWN.format(known=summary)}]


async def solve(question, search, client, longest, shorten=sum_up):
    """The answer, or None. A history of more than `longest` characters is shortened before the policy reads it."""

    async def say(agent, messages):
        reply = await client.chat.completions.create(model=agent, messages=messages)
        return reply.choices[0].message.content

    messages = [{"role": "system", "content": TASK.format(question=question)}]
    messages.append({"role": "user", "content": KNOWN.format(known="nothing")})
    for _ in range(6):
        if sum(len(each["content"]) for each in messages) > longest:
            messages = await shorten(messages, say)
        said = await say("policy", messages)
        tag, words = next(iter(re.findall(r"<(search|answer)>(.*?)</\1>", said, re.DOTALL)), ("", ""))
        if tag == "answer":
            return words.strip()
        found = search(words.strip()) if tag else "Write a search or an answer ."
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": found}]
    return None


def agent_with(index, longest=1500):
    def search(query):
        return "\n".join(passage.text for passage in index.search_batch([query], 3)[0]) or "nothing"

    async def agent(example, endpoint):
        client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        return exact_match(await solve(example["prompt"], search, client, longest), example["golden_answers"])

    return agent


if __name__ == "__main__":
    parser = TrlParser((Arguments, SOGRPOConfig))
    parser.set_defaults(output_dir="out", max_completion_length=2500, steps_per_generation=8)
    arguments, config = parser.parse_args_and_config()
    questions = load_questions(arguments.questions)
    rows = [{"prompt": each.question, "golden_answers": each.golden_answers} for each in questions]
    agent = agent_with(BM25Index.open(arguments.corpus, arguments.index), arguments.longest)
    rollout = EndpointRollout(agent, max_turn_tokens=500)
    trainer = SOGRPOTrainer(arguments.model, agent_reward, config, Dataset.from_list(rows), rollout_func=rollout)
    trainer.train()
    trainer.save_model()
