"""One policy as two agents, named by `model`: a planner asks, and a searcher answers from search results.

python quickstart.py  # writes the default questions and corpus
python examples/two_agents.py --model Qwen/Qwen2.5-0.5B-Instruct --output_dir out
"""

from dataclasses import dataclass

from datasets import Dataset
from openai import AsyncOpenAI
from trl import TrlParser

from sorl_trl import EndpointRollout, SOGRPOConfig, SOGRPOTrainer, agent_reward
from sorl_trl.qa import exact_match, load_questions
from sorl_trl.search import BM25Index

PLAN = "Find the answer in steps. Each time, write a question for a colleague, or `Answer:` and the answer."
SEARCH = "Answer the question from these passages, in a few words.\n"


@dataclass
class Arguments:
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    questions: str = "runs/quickstart/world/train.jsonl"
    corpus: str = "runs/quickstart/world/corpus.jsonl"
    index: str = "runs/index"


def agent_with(index):
    async def agent(example, endpoint):
        client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)

        async def say(role, messages):
            reply = await client.chat.completions.create(model=role, messages=messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            return messages[-1]["content"].strip()

        plan = [{"role": "system", "content": PLAN}, {"role": "user", "content": example["prompt"]}]
        for _ in range(4):
            said = await say("planner", plan)
            if said.startswith("Answer:"):
                return exact_match(said.removeprefix("Answer:"), example["golden_answers"])
            passages = "\n".join(passage.text for passage in index.search_batch([said], 3)[0])
            task = [{"role": "system", "content": SEARCH + passages}, {"role": "user", "content": said}]
            plan.append({"role": "user", "content": await say("searcher", task)})
        return 0.0

    return agent


if __name__ == "__main__":
    parser = TrlParser((Arguments, SOGRPOConfig))
    parser.set_defaults(output_dir="out", max_completion_length=2500, steps_per_generation=8)
    arguments, config = parser.parse_args_and_config()
    questions = load_questions(arguments.questions)
    rows = [{"prompt": each.question, "golden_answers": each.golden_answers} for each in questions]
    rollout = EndpointRollout(agent_with(BM25Index.open(arguments.corpus, arguments.index)), max_turn_tokens=500)
    trainer = SOGRPOTrainer(arguments.model, agent_reward, config, Dataset.from_list(rows), rollout_func=rollout)
    trainer.train()
    trainer.save_model()
