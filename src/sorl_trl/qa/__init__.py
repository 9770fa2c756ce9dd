"""Question answering: questions, prompts, and the one scorer that rewards and evaluation share."""

from sorl_trl.qa.answers import contains_answer, exact_match, normalize_answer, token_f1
from sorl_trl.qa.prompts import SEARCH_R1_TEMPLATE, build_prompt_rows, chat_prompt, text_prompt
from sorl_trl.qa.questions import Question, load_questions, write_questions
from sorl_trl.qa.rewards import exact_match_reward, f1_reward, format_reward, search_hit_turn_reward
from sorl_trl.qa.scoring import score_exact_match, score_f1, score_format, score_search_hits

__all__ = [
    "SEARCH_R1_TEMPLATE",
    "Question",
    "build_prompt_rows",
    "chat_prompt",
    "contains_answer",
    "exact_match",
    "exact_match_reward",
    "f1_reward",
    "format_reward",
    "load_questions",
    "normalize_answer",
    "score_exact_match",
    "score_f1",
    "score_format",
    "score_search_hits",
    "search_hit_turn_reward",
    "text_prompt",
    "token_f1",
    "write_questions",
]
