"""Your own rewards for a search agent: one per trajectory, and two per turn.

python quickstart.py  # writes the default questions and corpus
python examples/own_reward.py --model Qwen/Qwen2.5-3B --output_dir out
"""

from dataclasses import dataclass

from datasets import Dataset
from trl import TrlParser

from sorl_trl import SearchRollout, SOGRPOConfig, SOGRPOTrainer
from sorl_trl.qa import build_prompt_rows, contains_answer, exact_match, load_questions
from sorl_trl.search import BM25Index


@dataclass
class Arguments:
    model: str = "Qwen/Qwen2.5-3B"
    questions: str = "runs/quickstart/world/train.jsonl"
    corpus: str = "runs/quickstart/world/corpus.jsonl"
    index: str = "runs/index"


def right_and_brief(trajectory, golden_answers, **_):
    """1 for a right answer, minus 0.1 for each search after the first; None if the search was down."""
    rewards = []
    for each, gold in zip(trajectory, golden_answers, strict=True):
        if each.stop_reason.is_infrastructure_failure:
            rewards.append(None)
            continue
        searches = sum(turn.action.kind == "search" for turn in each.turns)
        right = each.answer is not None and exact_match(each.answer, gold)
        rewards.append(float(right) - 0.1 * max(0, searches - 1))
    return rewards


def well_formed(trajectory, **_):
    """0.1 for each turn with a well-formed action: a list of floats, one per turn."""
    return [[0.1 * (turn.action.kind != "invalid") for turn in each.turns] for each in trajectory]


def found_answer(trajectory, golden_answers, **_):
    """0.1 for the first turn after which the policy reads a golden answer."""
    rewards = []
    for each, gold in zip(trajectory, golden_answers, strict=True):
        hits = [reply is not None and contains_answer(reply.text, gold) for reply in each.replies]
        rewards.append([0.1 * (hit and not any(hits[:turn])) for turn, hit in enumerate(hits)])
    return rewards


if __name__ == "__main__":
    parser = TrlParser((Arguments, SOGRPOConfig))
    parser.set_defaults(output_dir="out", max_completion_length=2500, steps_per_generation=8)
    arguments, config = parser.parse_args_and_config()
    trainer = SOGRPOTrainer(
        model=arguments.model,
        reward_funcs=[right_and_brief, well_formed, found_answer],  # `--reward_weights 1.0 0.5 0.5` weighs them
        args=config,
        train_dataset=Dataset.from_list(build_prompt_rows(load_questions(arguments.questions))),
        rollout_func=SearchRollout(BM25Index.open(arguments.corpus, arguments.index)),
    )
    trainer.train()
    trainer.save_model()
