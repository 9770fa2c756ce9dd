"""A TRL script that trains a chat model with a tool: only two names differ from TRL's.

python examples/swap.py --model Qwen/Qwen2.5-0.5B-Instruct --output_dir out
"""

import random
from dataclasses import dataclass

from datasets import Dataset
from trl import TrlParser

from sorl_trl import SOGRPOConfig, SOGRPOTrainer  # instead of: from trl import GRPOConfig, GRPOTrainer


@dataclass
class Arguments:
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    rows: int = 1000


def multiply(a: int, b: int) -> int:
    """
    Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        Their product.
    """
    return a * b


def right(completions, product, **_):
    """1 if the last message contains the product."""
    return [float(str(gold) in said[-1]["content"]) for said, gold in zip(completions, product, strict=True)]


def build_dataset(rows: int) -> Dataset:
    pairs = [(random.randint(100, 999), random.randint(100, 999)) for _ in range(rows)]
    ask = "What is {} times {}? Use the tool, then give the product."
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": ask.format(a, b)}], "product": a * b} for a, b in pairs]
    )


if __name__ == "__main__":
    parser = TrlParser((Arguments, SOGRPOConfig))
    parser.set_defaults(output_dir="out", max_completion_length=512, steps_per_generation=8)  # 8 updates per rollout
    arguments, config = parser.parse_args_and_config()
    trainer = SOGRPOTrainer(
        model=arguments.model,
        reward_funcs=right,
        args=config,
        train_dataset=build_dataset(arguments.rows),
        tools=[multiply],
    )
    trainer.train()
    trainer.save_model()
