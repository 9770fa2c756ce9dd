"""An offline world of real facts, and a tiny policy that has just learnt to search it."""

from sorl_trl.sandbox.atlas import build_atlas
from sorl_trl.sandbox.expert import (
    LIMITS,
    NO_NOISE,
    PROMPT_TEMPLATE,
    PROTOCOL,
    THINKING_LIMITS,
    ExpertNoise,
    Hasty,
    ScriptedExpert,
    Thinker,
)
from sorl_trl.sandbox.imitation import (
    Example,
    LanguageModelWarmStart,
    ThinkingWarmStart,
    WarmStartConfig,
    example_of,
    expert_examples,
    imitate,
    store_policy,
    teach,
    warm_start,
)
from sorl_trl.sandbox.policy import PolicyConfig, make_policy, train_tokenizer, word_tokenizer
from sorl_trl.sandbox.world import CORPUS_FILE, EVALUATION_FILE, TRAIN_FILE, World, WorldSize

__all__ = [
    "CORPUS_FILE",
    "EVALUATION_FILE",
    "LIMITS",
    "NO_NOISE",
    "PROMPT_TEMPLATE",
    "PROTOCOL",
    "THINKING_LIMITS",
    "TRAIN_FILE",
    "Example",
    "ExpertNoise",
    "Hasty",
    "LanguageModelWarmStart",
    "PolicyConfig",
    "ScriptedExpert",
    "Thinker",
    "ThinkingWarmStart",
    "WarmStartConfig",
    "World",
    "WorldSize",
    "build_atlas",
    "example_of",
    "expert_examples",
    "imitate",
    "make_policy",
    "store_policy",
    "teach",
    "train_tokenizer",
    "warm_start",
    "word_tokenizer",
]
