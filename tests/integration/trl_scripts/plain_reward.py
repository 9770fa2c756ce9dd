"""As in TRL's documentation: a rollout function of the user's own, and a reward function that names what it takes."""

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def rollout_func(prompts, trainer):
    texts = [
        trainer.processing_class.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in prompts
    ]
    prompt_ids = [trainer.processing_class(text)["input_ids"] for text in texts]
    replies = [["No.", "Certainly not."][i % 2] + "<|im_end|>" for i in range(len(prompts))]
    completion_ids = [trainer.processing_class(reply)["input_ids"] for reply in replies]
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "logprobs": [[0.0] * len(ids) for ids in completion_ids],
        "env_reward": [float(len(reply)) for reply in replies],
    }


def reward_from_env(
    prompts, completions, completion_ids, level, env_reward, trainer_state, log_extra, log_metric
) -> list[float]:
    log_extra("level", level)
    log_metric("longest", max(map(len, completion_ids)))
    return [reward / 10 + len(completion) for reward, completion in zip(env_reward, completions, strict=True)]


trainer = GRPOTrainer(
    model=model,  # noqa: F821
    processing_class=tokenizer,  # noqa: F821
    train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "Is it?"}], "level": 1}] * 8),
    reward_funcs=reward_from_env,
    args=GRPOConfig(**settings),  # noqa: F821
    rollout_func=rollout_func,
)
trainer.train()
