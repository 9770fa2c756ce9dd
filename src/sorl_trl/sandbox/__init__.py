"""An offline world of real facts, an invented one, and a tiny policy that has just learnt to search in them."""

from sorl_trl.sandbox.atlas import build_atlas
from sorl_trl.sandbox.expert import NO_NOISE, ExpertNoise, ScriptedExpert, Thinker
from sorl_trl.sandbox.imitation import (
    Example,
    ThinkingWarmStart,
    WarmStartConfig,
    example_of,
    imitate,
    store_policy,
    warm_start,
)
from sorl_trl.sandbox.invented import Population, build_invented, invented_words
from sorl_trl.sandbox.policy import PolicyConfig, make_policy, train_tokenizer, word_tokenizer
from sorl_trl.sandbox.setting import LIMITS, LONG_LIMITS, PROMPT_TEMPLATE, PROTOCOL, THINKING_LIMITS
from sorl_trl.sandbox.world import CORPUS_FILE, EVALUATION_FILE, TRAIN_FILE, World, WorldSize

__all__ = [
    "CORPUS_FILE",
    "EVALUATION_FILE",
    "LIMITS",
    "LONG_LIMITS",
    "NO_NOISE",
    "PROMPT_TEMPLATE",
    "PROTOCOL",
    "THINKING_LIMITS",
    "TRAIN_FILE",
    "Example",
    "ExpertNoise",
    "PolicyConfig",
    "Population",
    "ScriptedExpert",
    "Thinker",
    "ThinkingWarmStart",
    "WarmStartConfig",
    "World",
    "WorldSize",
    "build_atlas",
    "build_invented",
    "example_of",
    "imitate",
    "invented_words",
    "make_policy",
    "store_policy",
    "train_tokenizer",
    "warm_start",
    "word_tokenizer",
]
