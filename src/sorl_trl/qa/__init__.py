"""Question answering: question sets, prompts, and the one scorer that rewards and evaluation share."""

from sorl_trl.qa.questions import (
    SEARCH_R1_TEMPLATE,
    Question,
    build_prompt_rows,
    load_questions,
    write_questions,
)
from sorl_trl.qa.scoring import (
    REWARDS,
    TASK_REWARDS,
    answer_reward,
    contains_answer,
    environment_reward,
    exact_match,
    exact_match_reward,
    f1_reward,
    normalize_answer,
    score_answer,
    score_choice,
    solved_reward,
    sub_exact_match,
    token_f1,
)

__all__ = [
    "REWARDS",
    "SEARCH_R1_TEMPLATE",
    "TASK_REWARDS",
    "Question",
    "answer_reward",
    "build_prompt_rows",
    "contains_answer",
    "environment_reward",
    "exact_match",
    "exact_match_reward",
    "f1_reward",
    "load_questions",
    "normalize_answer",
    "score_answer",
    "score_choice",
    "solved_reward",
    "sub_exact_match",
    "token_f1",
    "write_questions",
]
