"""An agent built on the OpenAI SDK that answers questions with a search tool, and its training.

python quickstart.py  # writes the default questions and corpus
python examples/openai_agent.py --model Qwen/Qwen3-0.6B --output_dir out
"""

import json
from dataclasses import dataclass

from datasets import Dataset
from openai import AsyncOpenAI
from trl import TrlParser

from sorl_trl import EndpointRollout, SOGRPOConfig, SOGRPOTrainer, agent_reward
from sorl_trl.qa import exact_match, load_questions
from sorl_trl.search import BM25Index

INSTRUCTIONS = "Look facts up with `search`, one at a time. Then give the answer alone, without a sentence."
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
SEARCH = {"name": "search", "description": "Finds passages.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": SEARCH}]


@dataclass
class Arguments:
    model: str = "Qwen/Qwen3-0.6B"
    questions: str = "runs/quickstart/world/train.jsonl"
    corpus: str = "runs/quickstart/world/corpus.jsonl"
    index: str = "runs/index"


def agent_with(index):
    async def agent(example, endpoint):
        client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        messages = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": example["prompt"]}]
        for _ in range(6):
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            message = reply.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return exact_match(message.content, example["golden_answers"])
            for call in message.tool_calls:
                query = json.loads(call.function.arguments)["query"]  # an error earns `reward_on_error`, 0
                found = "\n".join(passage.text for passage in index.search_batch([query], 3)[0])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
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
