"""Your own method: credit, surrogate and a term of the loss, each a function.

python quickstart.py  # writes the default questions and corpus
python examples/own_method.py --model Qwen/Qwen2.5-3B --output_dir out
"""

from dataclasses import dataclass

import torch
from datasets import Dataset
from trl import TrlParser

from sorl_trl import Method, SearchRollout, SOGRPOConfig, SOGRPOTrainer
from sorl_trl.methods import Objective
from sorl_trl.ops import is_outside, kl_to_old
from sorl_trl.qa import build_prompt_rows, exact_match_reward, load_questions
from sorl_trl.search import BM25Index


@dataclass
class Arguments:
    model: str = "Qwen/Qwen2.5-3B"
    questions: str = "runs/quickstart/world/train.jsonl"
    corpus: str = "runs/quickstart/world/corpus.jsonl"
    index: str = "runs/index"


def best_of_group(rollout):
    """Credit: (N, K) advantages, 1 on every turn of the best trajectories of each group."""
    totals = rollout.totals().nan_to_num(-torch.inf).view(-1, rollout.num_generations)
    best = (totals == totals.amax(1, keepdim=True)).float().flatten()
    return best.unsqueeze(1) * rollout.turn_mask


def hard_clip(batch):
    """Surrogate: each token's objective, and where its gradient is stopped; both (B, T)."""
    low, high, _ = batch.clip_range
    stopped = is_outside(batch.ratio.detach(), low, high)
    return Objective(torch.where(stopped, 0.0, batch.ratio * batch.advantages), stopped)


def stay_close(batch):
    """Term: a mean over the trajectories of the micro-batch, and metrics to log."""
    kl = kl_to_old(batch.log_ratio, batch.loss_mask, "unbiased").mean() * batch.row_scale
    return 0.1 * kl, {"stay_close": kl}


if __name__ == "__main__":
    parser = TrlParser((Arguments, SOGRPOConfig))
    parser.set_defaults(output_dir="out", max_completion_length=2500, steps_per_generation=8)
    arguments, config = parser.parse_args_and_config()
    dataset = Dataset.from_list(build_prompt_rows(load_questions(arguments.questions)))
    rollout = SearchRollout(BM25Index.open(arguments.corpus, arguments.index))
    method = Method(credit=best_of_group, surrogate=hard_clip, terms=(stay_close,))
    trainer = SOGRPOTrainer(arguments.model, exact_match_reward, config, dataset, rollout_func=rollout, method=method)
    trainer.train()
    trainer.save_model()
