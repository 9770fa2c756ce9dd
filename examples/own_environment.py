"""Your own environment: a game in which the policy guesses a number with the tag `<guess>`.

python examples/own_environment.py --model Qwen/Qwen2.5-0.5B-Instruct --output_dir out
"""

from dataclasses import dataclass

from datasets import Dataset
from trl import TrlParser

from sorl_trl import AgentRollout, SOGRPOConfig, SOGRPOTrainer
from sorl_trl.qa import environment_reward
from sorl_trl.rollout import Reply, RolloutLimits, TagProtocol
from sorl_trl.types import StopReason

PROMPT = "Guess a number from 1 to 9. A guess looks like this: <guess> 5 </guess>"


@dataclass
class Arguments:
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    rows: int = 1000


class HighLow:
    protocol = TagProtocol(tools=("guess",))

    def reset(self, number):
        """`number` is a column of the dataset."""
        self.number, self.left = number, 4

    def step(self, turn):
        guess, self.left = turn.action.content, self.left - 1
        if guess == str(self.number):
            return Reply(reward=1.0, stop=StopReason.ENVIRONMENT_DONE)
        if self.left == 0:
            return Reply(stop=StopReason.ENVIRONMENT_DONE)
        if not guess.isdecimal():
            return Reply("That is not a number.", reward=-0.1)
        return Reply("Higher." if int(guess) < self.number else "Lower.")


def rows(count):
    prompt = [{"role": "user", "content": PROMPT}]
    return [{"prompt": prompt, "number": n % 9 + 1} for n in range(count)]


if __name__ == "__main__":
    parser = TrlParser((Arguments, SOGRPOConfig))
    parser.set_defaults(output_dir="out", max_completion_length=512, steps_per_generation=8)
    arguments, config = parser.parse_args_and_config()
    trainer = SOGRPOTrainer(
        model=arguments.model,
        reward_funcs=environment_reward,  # the rewards that `step` returned
        args=config,
        train_dataset=Dataset.from_list(rows(arguments.rows)),
        rollout_func=AgentRollout(HighLow, limits=RolloutLimits(max_turns=4)),
    )
    trainer.train()
    trainer.save_model()
