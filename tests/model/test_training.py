"""Training a real model: what is padded with the token that ends messages, prompts, and TRL's own tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from sorl_trl import SOPPOConfig, SOPPOTrainer
from sorl_trl.trainers.critic import CRITIC_ATTRIBUTE
from tests.training import settings

ONE_STEP = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "steps_per_generation": 1}
SMALL = {**ONE_STEP, "num_iterations": 1, "max_steps": 1, "learning_rate": 1e-6, "max_completion_length": 48}
ENDING, CORRECTED, CUT, EMPTY = range(4)


def fixed(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Prompts of different lengths, and completions with `<|im_end|>` at the end, in the middle and nowhere."""
    tokenizer = trainer.processing_class
    asked = [tokenizer.encode("What is it?" * (1 + 2 * row)) for row in range(4)]
    end = tokenizer.eos_token_id
    parts = {
        ENDING: [(0, [*tokenizer.encode("It is Rome."), end])],
        CORRECTED: [
            (0, [*tokenizer.encode("Well"), end]),
            (-1, tokenizer.encode("\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n")),
            (1, [*tokenizer.encode("<answer>Rome</answer>")]),
            (-1, [end]),
        ],
        CUT: [(0, tokenizer.encode("It is the city that"))],
        EMPTY: [(-1, [end])],
    }
    rows = [parts[row] for row in range(4)]
    return {
        "prompt_ids": asked,
        "completion_ids": [[token for _, ids in row for token in ids] for row in rows],
        "turn_ids": [[turn for turn, ids in row for _ in ids] for row in rows],
        "logprobs": None,
    }


def test_padding_with_the_token_that_ends_messages(folder: str, tokenizer: Any, tmp_path: Path) -> None:
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    rows = Dataset.from_list([{"prompt": "x"}] * 8)
    config = SOPPOConfig(**settings(tmp_path, **{**SMALL, "num_generations": 1}))
    trainer = SOPPOTrainer(
        folder, lambda **_: [1.0, 0.0, 0.0, None], config, rows, processing_class=tokenizer, rollout_func=fixed
    )
    expected = fixed([], trainer)
    trainer.model.train()
    batch = trainer._generate_and_score_completions([dict(rows[0]) for _ in range(4)])
    for row in range(4):
        size = len(expected["completion_ids"][row])
        assert batch["completion_ids"][row, :size].tolist() == expected["completion_ids"][row]
        assert batch["completion_mask"][row].tolist() == [1] * size + [0] * (batch["completion_ids"].shape[1] - size)
        assert batch["turn_ids"][row, :size].tolist() == expected["turn_ids"][row]
        assert batch["turn_ids"][row, size:].eq(-1).all()
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
        assert prompt.tolist() == expected["prompt_ids"][row]
        assert batch["prompt_mask"][row].tolist() == sorted(batch["prompt_mask"][row].tolist()), "padded on the left"
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    policy_tokens = [sum(turn >= 0 for turn in turns) for turns in expected["turn_ids"]]
    assert logged["completions/clipped_ratio"] == 0.25, "one was cut"
    assert logged["completions/mean_length"] == sum(policy_tokens) / 4
    assert logged["completions/max_terminated_length"] == policy_tokens[CORRECTED]
    torch.nn.init.normal_(getattr(trainer.model, CRITIC_ATTRIBUTE).head.weight)
    logps, values = scored(trainer, batch)
    for row in range(4):
        mask = batch["completion_mask"][row].bool()
        alone = {
            f"prompt_{name}": batch[f"prompt_{name}"][row][batch["prompt_mask"][row].bool()][None] for name in NAMES
        }
        alone |= {f"completion_{name}": batch[f"completion_{name}"][row][mask][None] for name in NAMES}
        own_logps, own_values = scored(trainer, alone)
        torch.testing.assert_close(logps[row][mask], own_logps[0], rtol=0, atol=1e-3)
        torch.testing.assert_close(values[row][mask], own_values[0], rtol=1e-3, atol=1e-3)
        assert own_values.std() > 0.01 or len(own_values[0]) == 1
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


NAMES = ("ids", "mask")


def scored(trainer: Any, batch: Any) -> tuple[Any, Any]:
    """Log-probabilities and values of all completion tokens."""
    whole = {name: each for name, each in batch.items() if name.startswith(("prompt_", "completion_"))}
    with torch.no_grad():
        found = trainer._forward(trainer.model, whole, values=True)
    return found.logps, found.values
