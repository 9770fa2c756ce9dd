"""A batch some way off the policy, in float64, and what any loss is compared by: log-probabilities and gradients.

In float64 no comparison of a ratio with the edge of a clip range hangs on rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sorl_trl import SOGRPOTrainer
from sorl_trl.methods import Method
from sorl_trl.trainers.batch import OLD_POLICY_STEP
from tests.policies import build_policy
from tests.training import settings
from tests.trajectories import FixedRollout, parity_reward, prompts

EPSILON = 0.2


def build(folder: Path, tokenizer: Any, method: Any = None, trainer_class: Any = SOGRPOTrainer, **fields: Any) -> Any:
    """A trainer of a policy in float64 whose generation batch of 8 trajectories is one micro-batch."""
    arguments = settings(folder, per_device_train_batch_size=8, gradient_accumulation_steps=1)
    arguments |= {"steps_per_generation": 1, "epsilon": EPSILON, "gradient_checkpointing": False, **fields}
    rollout = arguments.pop("rollout_func", None) or FixedRollout()
    build_policy().double().save_pretrained(folder / "policy")  # TRL loads the reference from a path
    arguments["model_init_kwargs"] = {"dtype": "auto"}
    trainer = trainer_class(
        str(folder / "policy"),
        arguments.pop("reward_funcs", parity_reward),
        trainer_class.config_class(**arguments),
        prompts(),
        processing_class=tokenizer,
        rollout_func=rollout,
        method=Method() if method is None else method,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def off_policy_batch(folder: Path, tokenizer: Any, method: Any = None, **fields: Any) -> tuple[Any, dict[str, Any]]:
    """A trainer, and a batch of 8 trajectories whose old and reference log-probabilities lie some way off."""
    trainer = build(folder, tokenizer, method, **{"num_iterations": 2, **fields})
    batch = trainer._generate_and_score_completions([dict(row) for row in prompts(2) for _ in range(4)])
    batch[OLD_POLICY_STEP] = torch.tensor(-1)  # as if an update had been made since
    batch["advantages"] = batch["advantages"].double()
    generator = torch.Generator().manual_seed(7)
    for key in ("old_per_token_logps", "ref_per_token_logps"):
        if key in batch:
            noise = torch.randn(batch[key].shape, generator=generator, dtype=torch.float64)
            batch[key] = batch[key] + 0.6 * noise
    return trainer, batch


def token_logps(trainer: Any, batch: dict[str, Any]) -> torch.Tensor:
    """(B, T) log-probabilities of the policy's tokens, by passes of the test's own: one for each context."""
    logps = torch.zeros_like(batch["completion_ids"], dtype=torch.float64)
    for row, position, ids, output in read_apart(trainer, batch):
        scores = output.logits[0, :-1].double().log_softmax(-1)
        logps = logps.index_put((torch.tensor(row), position), scores.gather(1, ids[1:, None])[-len(position) :, 0])
    return logps


def read_apart(trainer: Any, batch: dict[str, Any]) -> Iterator[tuple[int, Any, Any, Any]]:
    """For each context: its row, the positions of its tokens but for the first one's, all its tokens, and output."""
    contexts = batch.get("context_ids", torch.zeros_like(batch["completion_ids"])).abs()
    for row in range(len(contexts)):
        kept = batch["completion_mask"][row].bool()
        for context in contexts[row][kept].unique().tolist():
            position = torch.nonzero(kept & (contexts[row] == context)).flatten()
            ids = batch["completion_ids"][row, position]
            if context == 0:
                ids = torch.cat([batch["prompt_ids"][row][batch["prompt_mask"][row].bool()], ids])
            output = trainer.model(input_ids=ids[None], output_hidden_states=True)
            yield row, position if context == 0 else position[1:], ids, output


def gradient(loss: torch.Tensor, trainer: Any) -> torch.Tensor:
    """Of all parameters, in one row."""
    parameters = list(trainer.model.parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
    return torch.cat([part.flatten() for part in parts]).double()


def assert_same_loss(trainer: Any, ours: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal in value and gradient, and the gradient is there."""
    assert abs(ours.item() - expected.item()) < 1e-6
    of_expected = gradient(expected, trainer)
    assert of_expected.abs().max() > 1e-4, "nothing is learnt: a weak test"
    torch.testing.assert_close(gradient(ours, trainer), of_expected, rtol=0, atol=1e-6)
