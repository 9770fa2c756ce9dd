"""PPO for a search agent. Afterwards, the critic evaluates the last trajectories.

python quickstart.py  # writes the default questions and corpus
python examples/ppo.py --model Qwen/Qwen2.5-3B --output_dir out-ppo
"""

from dataclasses import dataclass

from datasets import Dataset
from trl import TrlParser

from sorl_trl import SearchRollout, SOPPOConfig, SOPPOTrainer, load_critic
from sorl_trl.qa import build_prompt_rows, exact_match_reward, load_questions
from sorl_trl.search import BM25Index


@dataclass
class Arguments:
    model: str = "Qwen/Qwen2.5-3B"
    questions: str = "runs/quickstart/world/train.jsonl"
    corpus: str = "runs/quickstart/world/corpus.jsonl"
    index: str = "runs/index"


if __name__ == "__main__":
    parser = TrlParser((Arguments, SOPPOConfig))
    parser.set_defaults(output_dir="out-ppo", max_completion_length=2500, steps_per_generation=8)
    arguments, config = parser.parse_args_and_config()
    last = []

    def reward(trajectory, **columns):
        """Keeps the trajectories of the last rollout, to show their values."""
        last[:] = trajectory
        return exact_match_reward(trajectory=trajectory, **columns)

    trainer = SOPPOTrainer(
        model=arguments.model,
        reward_funcs=reward,
        args=config,  # `--critic model` trains a separate value model
        train_dataset=Dataset.from_list(build_prompt_rows(load_questions(arguments.questions))),
        rollout_func=SearchRollout(BM25Index.open(arguments.corpus, arguments.index)),
    )
    trainer.train()
    trainer.save_model()
    critic = load_critic(config.output_dir)
    for trajectory, values in zip(last[:4], critic.turn_values(last[:4]), strict=True):
        print(trajectory.answer, [f"{value:.2f}" for value in values])  # V(s) where each turn starts
