"""Question answering: question sets, prompts, and the one scorer that rewards and evaluation share."""

from sorl_trl.qa.answers import contains_answer, exact_match, normalize_answer, sub_exact_match, token_f1
from sorl_trl.qa.benchmarks import BENCHMARKS, Benchmark, load_benchmark
from sorl_trl.qa.choices import named_letter, right_letter
from sorl_trl.qa.prompts import (
    CHOICE_INSTRUCTION,
    SEARCH_R1_TEMPLATE,
    build_prompt_rows,
    chat_prompt,
    question_text,
    text_prompt,
)
from sorl_trl.qa.questions import Question, load_questions, write_questions
from sorl_trl.qa.rewards import (
    REWARDS,
    TURN_REWARDS,
    RewardFunction,
    answer_reward,
    choice_reward,
    exact_match_reward,
    f1_reward,
    format_reward,
    search_hit_turn_reward,
    sub_exact_match_reward,
    turn_format_reward,
)
from sorl_trl.qa.scoring import (
    score_answer,
    score_choice,
    score_exact_match,
    score_f1,
    score_format,
    score_search_hits,
    score_sub_exact_match,
    score_turn_format,
)

__all__ = [
    "BENCHMARKS",
    "CHOICE_INSTRUCTION",
    "REWARDS",
    "SEARCH_R1_TEMPLATE",
    "TURN_REWARDS",
    "Benchmark",
    "Question",
    "RewardFunction",
    "answer_reward",
    "build_prompt_rows",
    "chat_prompt",
    "choice_reward",
    "contains_answer",
    "exact_match",
    "exact_match_reward",
    "f1_reward",
    "format_reward",
    "load_benchmark",
    "load_questions",
    "named_letter",
    "normalize_answer",
    "question_text",
    "right_letter",
    "score_answer",
    "score_choice",
    "score_exact_match",
    "score_f1",
    "score_format",
    "score_search_hits",
    "score_sub_exact_match",
    "score_turn_format",
    "search_hit_turn_reward",
    "sub_exact_match",
    "sub_exact_match_reward",
    "text_prompt",
    "token_f1",
    "turn_format_reward",
    "write_questions",
]
