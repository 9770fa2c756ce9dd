"""The questions of `benchmarks.stability` for a mixture of experts whose engine computes unlike the trainer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from examples.quickstart import LIMITS, PROTOCOL, WorldSize
from examples.quickstart.imitation import expert_examples, imitate, store_policy, train_tokenizer
from transformers import MixtralConfig, MixtralForCausalLM

from benchmarks.worlds.invented import build_invented
from benchmarks.worlds.questions import EVALUATION_QUESTIONS, TRAIN_QUESTIONS, QuestionWorld
from sorl_trl import SearchRollout
from sorl_trl.rollout import SlotEngine, TurnEnd
from sorl_trl.rollout.routing import Routers, weights_of

ENGINES = ("noise", "bfloat16")
NOISE = 0.5
"""The standard deviation of what is added to the logits of the engine's routers."""
PRACTICE = 4
"""Worlds in which an expert is imitated."""


@dataclass(frozen=True)
class MixtureWorld(QuestionWorld):
    """The world of `benchmarks.stability`, with a policy that is a mixture, and an engine that computes otherwise."""

    kind: str = ""

    @property
    def name(self) -> str:
        return "mixture"

    @property
    def settings(self) -> tuple[object, ...]:
        return *super().settings, self.kind, NOISE, PRACTICE

    def build(self, seed: int, target: Path, cache: Path) -> Path:
        size = WorldSize(TRAIN_QUESTIONS, EVALUATION_QUESTIONS, self.hop_shares)
        world, unseen, *practice = (build_invented(1000 * seed + i, size=size) for i in range(2 + PRACTICE))
        self.write({"train": world, "unseen": unseen}, target)
        tokenizer = train_tokenizer([world, *practice])
        torch.manual_seed(seed)
        policy = MixtralForCausalLM(
            MixtralConfig(
                **{"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
                **{"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 8},
                **{"max_position_embeddings": 2 * (LIMITS.max_trajectory_tokens or 0), "tie_word_embeddings": True},
                **{"initializer_range": 0.05, "sliding_window": None, "bos_token_id": None},
                **{"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id},
            )
        )
        how = replace(self.warm_start, seed=seed)
        share = how.trajectories // len(practice)
        examples = [each for part in practice for each in expert_examples(part, tokenizer, share, how)]
        imitate(policy, examples, how.steps, how.batch_size, how.learning_rate, seed)
        return store_policy(policy, tokenizer, cache / f"mixture-{seed}")

    def trainer_arguments(self, folder: Path) -> dict[str, Any]:
        given = super().trainer_arguments(folder)
        return {**given, "rollout_func": OtherEngine(given["rollout_func"].search, self.limits, self.kind)}


WORLDS = {kind: MixtureWorld("Mixture", "one hop or two", kind=kind) for kind in ENGINES}


def choose_noisily(router: Any, _args: Any, output: Any) -> tuple[Any, Any, Any]:
    """A hook: the router chooses by noisy logits, and weighs its choice as always."""
    logits, weights, _ = output
    experts = (logits + NOISE * torch.randn_like(logits)).topk(router.top_k, dim=-1).indices
    return logits, weights_of(router, logits, experts).to(weights.dtype), experts


class OtherEngine(SearchRollout):
    """Samples with a copy of the policy that computes otherwise, and reports its experts and log-probabilities."""

    def __init__(self, search: Any, limits: Any, kind: str) -> None:
        super().__init__(search, PROTOCOL, limits)
        self._kind = kind

    def roll_out(self, prompts: Any, trainer: Any, examples: Any) -> Any:
        sampler = MixtralForCausalLM.from_pretrained(trainer.model.name_or_path)  # TRL changes its own forward
        sampler.load_state_dict(trainer.model.state_dict())
        if self._kind == "bfloat16":
            sampler.to(torch.bfloat16)
        end = TurnEnd(trainer._tokenizer, self.stop_strings, trainer.eos_token_ids)
        engine = SlotEngine(sampler, end, trainer.generation_config)
        engine.report_routes()
        if self._kind == "noise":
            for router in Routers(sampler).modules:
                router.register_forward_hook(choose_noisily)
        engine.logprobs_at = trainer.temperature
        found, metrics = self.collect(self.setup(trainer), prompts, examples, engine)
        for name, value in metrics.items():
            trainer._log_metric(name, value)
        return found
