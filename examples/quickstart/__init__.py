"""An offline world of real facts, and a tiny policy that has just learnt to search it.

`python quickstart.py` runs it; with `--model FOLDER`, the policy is a language model, such as the one that
`python -m examples.quickstart.model smollm2-135m FOLDER` writes.
"""

from .expert import LIMITS, NO_NOISE, PROMPT_TEMPLATE, PROTOCOL, ExpertNoise, Hasty, ScriptedExpert, Thinker
from .imitation import (
    LANGUAGE_MODEL,
    THINKING,
    Example,
    PolicyConfig,
    WarmStartConfig,
    example_of,
    expert_examples,
    imitate,
    make_policy,
    store_policy,
    train_tokenizer,
    warm_start,
    word_tokenizer,
)
from .world import CORPUS_FILE, EVALUATION_FILE, TRAIN_FILE, World, WorldSize, build_atlas

__all__ = [
    "CORPUS_FILE",
    "EVALUATION_FILE",
    "LANGUAGE_MODEL",
    "LIMITS",
    "NO_NOISE",
    "PROMPT_TEMPLATE",
    "PROTOCOL",
    "THINKING",
    "TRAIN_FILE",
    "Example",
    "ExpertNoise",
    "Hasty",
    "PolicyConfig",
    "ScriptedExpert",
    "Thinker",
    "WarmStartConfig",
    "World",
    "WorldSize",
    "build_atlas",
    "example_of",
    "expert_examples",
    "imitate",
    "make_policy",
    "store_policy",
    "train_tokenizer",
    "warm_start",
    "word_tokenizer",
]
