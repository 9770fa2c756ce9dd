"""How much of a sequence's log-ratio is rounding, where the policy computes in bfloat16?

    python -m benchmarks.ratio_rounding     # a minute of one core

A random Llama of four layers scores what it has sampled, before and after every weight has moved by a learning rate,
in a random direction, as an optimizer step of Adam moves it: in float32, and under bfloat16 autocast with float32
weights, as TRL trains by default. The difference of the two log-ratios is rounding. The sharper its head, the surer it
is of its tokens. Writes `benchmarks/results/ratio_rounding.md`.
"""

from __future__ import annotations

import os
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.stability_report import lines_of_table
from sorl_trl.command_line import Parser, run_command
from sorl_trl.ops import is_outside, scaled_clip_range
from sorl_trl.ops.importance import LONGEST

TABLE = Path(__file__).parent / "results/ratio_rounding.md"
LENGTHS = (16, 64, 256, 1024)
STEP = 1e-6
"""A learning rate of policies that are worth training."""
SHARPNESS = (2, 8, 32)
"""By which the head of the random policy is multiplied."""
SEQUENCES = 8
EPSILON = 0.2
HEADER = """# How much of a sequence's log-ratio is rounding

Written by `python -m benchmarks.ratio_rounding`: root mean squares over {sequences} sequences of 1,024 tokens (shorter
ones are their parts) that a random policy of {parameters:,} parameters has sampled, and the share of sequences outside
the clip range of the defaults. Every weight has moved by {step:g}.
"""


def build_policy(sharpness: float) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=1000, max_position_embeddings=2048, eos_token_id=None, pad_token_id=0, **sizes)
    policy = LlamaForCausalLM(config)
    with torch.no_grad():
        policy.lm_head.weight *= sharpness
    return policy


@torch.no_grad()
def score(policy: LlamaForCausalLM, ids: Tensor, halves: bool) -> Tensor:
    """(B, T) log-probabilities of the tokens after the first."""
    with torch.autocast("cpu", torch.bfloat16, enabled=halves):
        logits = policy(ids).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def moved(policy: LlamaForCausalLM, ids: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """(B, T) log-ratios of tokens in float32 and in bfloat16, once all weights have moved by `step`."""
    before = [score(policy, ids, halves) for halves in (False, True)]
    kept = [weight.clone() for weight in policy.parameters()]
    for weight in policy.parameters():
        weight += step * torch.randn_like(weight).sign()
    exact, rounded = (score(policy, ids, halves) - was for halves, was in zip((False, True), before, strict=True))
    for weight, was in zip(policy.parameters(), kept, strict=True):
        weight.copy_(was)
    return exact, rounded


def outside(log_ratio: Tensor, tokens: int) -> float:
    """Share of sequences outside the range of the defaults, from their (N,) mean log-ratios."""
    epsilon = scaled_clip_range(EPSILON, torch.zeros(1, tokens, dtype=torch.int64), "sequence", "length")[0, 0]
    return is_outside(log_ratio.exp(), epsilon, epsilon).float().mean().item()


def rows() -> list[list[str]]:
    body = []
    for sharpness in SHARPNESS:
        policy = build_policy(sharpness)
        first = torch.randint(1, 1000, (SEQUENCES, 1))
        ids = policy.generate(first, do_sample=True, top_k=0, max_new_tokens=LENGTHS[-1], use_cache=True)
        entropy = f"{-score(policy, ids, halves=False).mean().item():.1f}"
        exact, rounded = moved(policy, ids, STEP)
        for tokens in LENGTHS:
            means = [of_tokens.reshape(-1, tokens).mean(1) for of_tokens in (exact, rounded)]
            spreads = [spread.square().mean().sqrt() for spread in (means[0], means[1] - means[0])]
            figures = [EPSILON / min(tokens, LONGEST), *spreads]
            shares = [f"{outside(mean, tokens):.2f}" for mean in means]
            body.append([entropy, str(tokens), *(f"{figure:.1e}" for figure in figures), *shares])
    return body


def main(words: Sequence[str]) -> None:
    Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args(words)
    torch.set_num_threads(1)
    columns = [
        "nats per token",
        "tokens",
        "range",
        "log-ratio, float32",
        "rounding",
        "outside, float32",
        "outside, bfloat16",
    ]
    parameters = build_policy(1).num_parameters()
    header = HEADER.format(sequences=SEQUENCES, parameters=parameters, step=STEP)
    TABLE.write_text(f"{header}\n{lines_of_table(columns, rows())}")
    print(f"The table is in {TABLE}.")


if __name__ == "__main__":
    sys.exit(run_command(main))
