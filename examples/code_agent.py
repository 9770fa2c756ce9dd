"""Trains a smolagents `CodeAgent`, which searches and answers by writing Python.

The policy's code runs in smolagents' own executor, within this process. The executor restricts imports and built-in
functions, but its authors do not call it a sandbox: train where nothing can be lost, or pass an `executor_type` such
as "docker".

pip install 'smolagents[openai]'
python quickstart.py  # writes the default questions and corpus
python examples/code_agent.py --model Qwen/Qwen2.5-Coder-0.5B-Instruct --output_dir out
"""

from dataclasses import dataclass

from datasets import Dataset
from smolagents import CodeAgent, OpenAIModel, tool
from trl import TrlParser

from sorl_trl import EndpointRollout, SOGRPOConfig, SOGRPOTrainer, agent_reward
from sorl_trl.qa import exact_match, load_questions
from sorl_trl.search import BM25Index


@dataclass
class Arguments:
    model: str = "Qwen/Qwen2.5-Coder-0.5B-Instruct"
    questions: str = "runs/quickstart/world/train.jsonl"
    corpus: str = "runs/quickstart/world/corpus.jsonl"
    index: str = "runs/index"


def agent_with(index):
    @tool
    def search(query: str) -> str:
        """
        Finds passages.

        Args:
            query: What to look for.
        """
        return "\n".join(passage.text for passage in index.search_batch([query], 3)[0])

    def agent(example, endpoint):
        model = OpenAIModel("policy", api_base=endpoint.base_url, api_key=endpoint.api_key)
        answer = CodeAgent([search], model, max_steps=5, verbosity_level=0).run(example["prompt"])
        return exact_match(str(answer), example["golden_answers"])

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
