"""Trains an agent built on the OpenAI SDK. Copy this script, and put in your agent, questions and reward.

python -c 'from examples.quickstart import build_atlas; build_atlas(0, plain=True).write("runs/world")'
python examples/train_my_agent.py --output_dir runs/mine --use_vllm
"""

import json
from dataclasses import dataclass
from functools import cache

from datasets import Dataset
from openai import AsyncOpenAI, OpenAIError
from trl import ModelConfig, TrlParser, get_peft_config

from sorl_trl import EndpointRollout, SOGRPOConfig, SOGRPOTrainer, agent_reward
from sorl_trl.diagnostics.callbacks import CollapseGuard
from sorl_trl.qa import exact_match, load_questions
from sorl_trl.rollout.chat import ensure_response_template
from sorl_trl.search import BM25Index

WORLD = "runs/world"
INSTRUCTIONS = "Look facts up with `search`, one at a time. Then give the answer alone, without a sentence."
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
SEARCH = {"name": "search", "description": "Finds passages.", "parameters": PARAMETERS}
JUDGE = "Question: {question}\nRight: {golden_answers}\nGiven: {answer}\nDo they mean the same? Reply yes or no."
open_index = cache(BM25Index.open)


@dataclass
class Arguments:
    questions: str = f"{WORLD}/train.jsonl"
    held_out: str = f"{WORLD}/eval.jsonl"
    corpus: str = f"{WORLD}/corpus.jsonl"  # in which the agent searches
    max_turn_tokens: int = 2048  # thoughts included
    judge: str | None = None  # a model at OPENAI_BASE_URL, which then decides what is right


args = Arguments()  # until the command line is read


async def agent(example, endpoint):
    """Your agent. It gets one question and returns its reward; each API call is a turn of the policy."""
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": example["question"]}]
    tools, index = [{"type": "function", "function": SEARCH}], open_index(args.corpus, f"{args.corpus}.index")
    for _ in range(6):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
        messages.append(message := reply.choices[0].message)
        if not message.tool_calls:
            answer, gold = message.content, example["golden_answers"]
            return await judged(answer, example) if args.judge else exact_match(answer, gold)
        for call in message.tool_calls:
            query = json.loads(call.function.arguments)["query"]  # an error earns `reward_on_error`, 0
            found = "\n".join(passage.text for passage in index.search_batch([query], 3)[0])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return 0.0


async def judged(answer, example):
    asked = {"role": "user", "content": JUDGE.format(**example | {"answer": answer})}
    try:
        reply = await AsyncOpenAI().chat.completions.create(model=args.judge, messages=[asked])
    except OpenAIError:
        return None  # leaves the trajectory out
    return float(reply.choices[0].message.content.strip().lower().startswith("yes"))


def options(words=None):
    """The options of a command line. These are the defaults."""
    parser = TrlParser((Arguments, SOGRPOConfig, ModelConfig))
    lora = {"use_peft": True, "lora_r": 32, "lora_target_modules": "all-linear", "learning_rate": 1e-5}
    size = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 32, "steps_per_generation": 64}
    test = {"eval_on_start": True, "num_generations_eval": 1, "per_device_eval_batch_size": 32}
    vllm = {"vllm_mode": "colocate", "vllm_enable_sleep_mode": True, "vllm_importance_sampling_mode": "token_truncate"}
    window = {"vllm_max_model_length": 8192}  # vLLM must have room for it; Qwen3's own is 40960
    base = {"model_name_or_path": "Qwen/Qwen3-4B", "dtype": "bfloat16", "max_completion_length": 6144}
    logs = {"output_dir": "out", "max_steps": 200, "logging_steps": 1, "save_steps": 50, "save_trajectories_steps": 20}
    parser.set_defaults(**base, **lora, **size, **test, **vllm, **window, **logs)
    return parser.parse_args_and_config(words)


if __name__ == "__main__":
    args, config, model = options()
    config.model_init_kwargs = {"dtype": model.dtype}
    loaded = map(load_questions, (args.questions, args.held_out))
    sets = [Dataset.from_list([{"prompt": each.question, **vars(each)} for each in rows]) for rows in loaded]
    rollout = EndpointRollout(agent, args.max_turn_tokens)
    more = {"rollout_func": rollout, "peft_config": get_peft_config(model), "callbacks": [CollapseGuard("stop")]}
    # refuses a model whose chat template shows no tools, before its weights are loaded
    more["processing_class"] = ensure_response_template(model.model_name_or_path, {}, config.trust_remote_code)
    trainer = SOGRPOTrainer(model.model_name_or_path, agent_reward, config, *sets, **more)
    trainer.train(config.resume_from_checkpoint)
    trainer.save_model()
    trainer.evaluate()  # prints the reward on held-out questions, before and after
    trainer.save_state()  # into trainer_state.json, with everything that was logged
