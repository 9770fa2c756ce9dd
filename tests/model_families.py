"""Tiny models of many families, and rollouts of several turns to compare engines on them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import transformers as hf

from sorl_trl.rollout import Engine, Generation, TurnEnd, TurnRequest
from tests.policies import WORDS, word_tokenizer

VOCABULARY = len(WORDS)
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
WINDOW = {"sliding_window": 6}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
GQA = {**SHAPE, "num_key_value_heads": 2}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "eos_token_id": 1}
LOCAL = [[["global", "local"], 1]]
GPT_NEO = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": LOCAL}
BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}
STOPS = ("w5 w6", "w7", "w11")

SERVED: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GQA)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GQA, tie_word_embeddings=True)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GQA, head_dim=16, tie_word_embeddings=True)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**SHAPE, num_key_value_heads=1, head_dim=16)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GQA, sliding_window=None)),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**SHAPE)),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SHAPE)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, bos_token_id=1)),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**GQA, **MOE, head_dim=8)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GQA, num_local_experts=4)),
}
"""Those that slots serve."""
GEMMA = {**GQA, "head_dim": 16}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "mistral": (lambda: hf.MistralForCausalLM(hf.MistralConfig(**GQA, sliding_window=8)), "DynamicSlidingWindowLayer"),
    "gemma2": (lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**GEMMA)), "DynamicSlidingWindowLayer"),
    "gemma3": (lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**GEMMA)), "DynamicSlidingWindowLayer"),
    "phi3": (lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**GQA)), "overrides `prepare_inputs_for_generation`"),
    "bloom": (lambda: hf.BloomForCausalLM(hf.BloomConfig(**BLOOM)), "failed with a slot cache"),
    "qwen3_next": (lambda: hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**GQA)), "LinearAttentionLayer"),
    "gpt_neo": (lambda: hf.GPTNeoForCausalLM(hf.GPTNeoConfig(**GPT_NEO)), "local attention"),
    "t5": (lambda: hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=32, d_model=8, num_layers=1)), "an encoder"),
    "bert": (lambda: tiny("bert"), "is bidirectional"),
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GQA, is_causal=False)), "is bidirectional"),
}
"""Those that slots do not serve, and a part of the reason that is given."""
DENSE_FIRST = {**GQA, **MOE, "num_hidden_layers": 3, "mlp_only_layers": [0], "head_dim": 8}
MIXTURES: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**DENSE_FIRST)),
    "mixtral": SERVED["mixtral"],
}
"""Mixtures with two routers that choose two of four experts. The first layer of "qwen3_moe" has none."""
_SIZES: dict[int, tuple[str, ...]] = {
    0: ("num_kv_shared_layers",),
    1: ("n_shared_experts", "n_group", "topk_group"),
    2: (
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"),
        *("num_key_value_heads", "num_experts_per_tok", "moe_topk", "moe_k", "altup_num_inputs"),
    ),
    4: (
        *("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ),
    8: ("head_dim", "rotary_dim", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    16: ("moe_intermediate_size", "expert_ffn_hidden_size", "q_lora_rank"),
    32: (
        *("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "emb_dim", "word_embed_proj_dim"),
        *("vocab_size", "vocab_size_per_layer_input"),  # as many as there are words
    ),
    48: ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"),
    256: ("max_position_embeddings", "n_positions", "n_ctx"),
}
"""What configs call a size of ours."""


def tiny(kind: str, **options: Any) -> Any:
    """The causal language model of a `model_type`, with a sliding window of 6 in layer 0 where its config knows one.

    Raises, with errors of many classes, if it is larger than that, or its parts want configs of their own.
    """
    config_class = hf.CONFIG_MAPPING[kind]
    known = {each.name for each in fields(config_class)}
    wanted = {name: size for size, names in _SIZES.items() for name in names}
    wanted |= {
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "use_sliding_window": True,
        **WINDOW,
        **options,
    }
    if "kv_lora_rank" in known:  # attention that compresses keys has as many heads of them
        wanted["num_key_value_heads"] = 4
    config = config_class(**{name: value for name, value in wanted.items() if name in known})
    model_class = hf.MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    with torch.device("meta"):
        if sum(parameter.numel() for parameter in model_class(config).parameters()) > 1e7:
            raise ValueError(f"{kind} is large")
    return model_class(config)


def build(make: Callable[[], Any], seed: int = 0) -> Any:
    """A model in eval mode whose greedy continuations are varied: most of its weights are larger than usual.

    In float64, so that no choice of a token hangs on how a processor orders sums.
    """
    torch.manual_seed(seed)
    model = make().eval().double()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the default's kernel does not take float64
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name and "wte" not in name:
                parameter.mul_(10)
    return model


def turn_end() -> TurnEnd:
    return TurnEnd(word_tokenizer(WORDS), STOPS, [1])


@dataclass
class Plan:
    """What is read and allowed in each turn of each row, and how many polls a reply takes."""

    prompts: list[list[int]]
    observations: list[list[list[int]]]
    """By row and turn: what comes before the turn; nothing before the first."""
    limits: list[list[int]]
    delays: list[list[int]] = field(default_factory=list)

    def delay(self, row: int, turn: int) -> int:
        return self.delays[row][turn] if self.delays else 0


def random_plan(rows: int = 8, turns: int = 3, seed: int = 0, group: int = 4) -> Plan:
    """Groups of rows share a prompt."""
    rng = random.Random(seed)

    def words(least: int, most: int) -> list[int]:
        return [rng.randrange(4, VOCABULARY) for _ in range(rng.randint(least, most))]

    prompts = [words(1, 9) for _ in range(-(-rows // group))]
    return Plan(
        prompts=[prompts[row // group] for row in range(rows)],
        observations=[[[], *(words(0, 9) for _ in range(turns - 1))] for _ in range(rows)],
        limits=[[rng.randint(1, 12) for _ in range(turns)] for _ in range(rows)],
        delays=[[rng.randint(0, 4) for _ in range(turns)] for _ in range(rows)],
    )


def play(engine: Engine, plan: Plan, close: bool = True) -> list[list[tuple[tuple[int, ...], Generation]]]:
    """Each row's contexts with the turns that were generated from them."""
    contexts = [list(prompt) for prompt in plan.prompts]
    played: list[list[tuple[tuple[int, ...], Generation]]] = [[] for _ in contexts]
    due = [(0, row) for row in range(len(contexts))]
    engine.open(len(contexts))
    polls = 0
    while due or not engine.idle:
        for at, row in sorted(due):
            if at <= polls or engine.idle:
                due.remove((at, row))
                contexts[row] += plan.observations[row][len(played[row])]
                engine.submit(TurnRequest(row, contexts[row], plan.limits[row][len(played[row])]))
        for row, generation in engine.poll():
            played[row].append((tuple(contexts[row]), generation))
            contexts[row] += generation.token_ids
            if len(played[row]) < len(plan.limits[row]):
                due.append((polls + 1 + plan.delay(row, len(played[row])), row))
            else:
                engine.release(row)
        polls += 1
    if close:
        engine.close()
    return played
