"""Question answering: question sets, prompts, and the one scorer that rewards and evaluation share."""

from sorl_trl.qa.answers import contains_answer, exact_match, normalize_answer, sub_exact_match, token_f1
from sorl_trl.qa.benchmarks import BENCHMARKS, Benchmark, load_benchmark
from sorl_trl.qa.prompts import SEARCH_R1_TEMPLATE, build_prompt_rows, encode_prompts
from sorl_trl.qa.questions import Question, load_questions, write_questions
from sorl_trl.qa.rewards import (
    REWARDS,
    TASK_REWARDS,
    answer_reward,
    choice_reward,
    environment_reward,
    exact_match_reward,
    f1_plus_reward,
    f1_reward,
    format_reward,
    search_hit_turn_reward,
    solved_reward,
    sub_exact_match_reward,
    turn_format_reward,
)
from sorl_trl.qa.scoring import score_answer, score_choice, score_f1_plus, score_search_hits

__all__ = [
    "BENCHMARKS",
    "REWARDS",
    "SEARCH_R1_TEMPLATE",
    "TASK_REWARDS",
    "Benchmark",
    "Question",
    "answer_reward",
    "build_prompt_rows",
    "choice_reward",
    "contains_answer",
    "encode_prompts",
    "environment_reward",
    "exact_match",
    "exact_match_reward",
    "f1_plus_reward",
    "f1_reward",
    "format_reward",
    "load_benchmark",
    "load_questions",
    "normalize_answer",
    "score_answer",
    "score_choice",
    "score_f1_plus",
    "score_search_hits",
    "search_hit_turn_reward",
    "solved_reward",
    "sub_exact_match",
    "sub_exact_match_reward",
    "token_f1",
    "turn_format_reward",
    "write_questions",
]
