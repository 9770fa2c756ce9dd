"""The private bodies that this package rests on, and how they are kept: as text, so that a change can be read.

`python -m tests.trl_seams` writes what is installed to `tests/contract/trl_bodies/`, one file a body, without comments
and docstrings. Run it after reading what has changed, never before.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
import trl
from transformers import Trainer
from transformers.integrations.deepspeed import deepspeed_load_checkpoint
from trl import GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.models import utils as model_utils
from trl.trainer import utils as trainer_utils
from trl.trainer.callbacks import SyncRefModelCallback

FOLDER = Path(__file__).parent / "contract" / "trl_bodies"

OVERRIDDEN = {
    "_tool_call_loop": "trajectories to which a tool says that it is down are masked; hits are logged",
    "_get_tool_suffix_ids": "what tools return is sanitized",
    "_generate": "turn ids of the completions, from recorded spans or the mask; what `reset` adds is sanitized",
    "_generate_and_score_completions": "turn rewards are recorded; turn_ids and turn advantages join the batch",
    "_get_per_token_logps_and_entropies": "the seam: turn ratios in place of token ratios; the critic's values",
    "_compute_loss": "weights of the turn mean, clipping-triggered normalization, value loss, metrics",
    "training_step": "division by the norm of the clipping bias; a turn that nobody has is no step",
    "_prepare_inputs": "rollouts wait for later ones where staleness is asked for; turns one at a time",
    "_get_train_sampler": "the order of prompts follows the epoch, also in a resumed run",
    "_run_epoch": "the sampler is told the epoch",
    "train": "whether all machines see the checkpoints",
    "_save_checkpoint": "the unfinished generation cycle",
    "_prepare_for_training": "the unfinished generation cycle of the checkpoint from which a run goes on",
    "create_optimizer": "the critic's learning rate",
    "create_scheduler": "the critic's warm-up",
    "save_model": "the critic is whole when it is gathered",
    "_save": "the policy without its critic, and `critic/` beside it",
    "_load_from_checkpoint": "the policy without its critic, and the critic from `critic/`",
    "_load_best_model": "as `_load_from_checkpoint`",
    "_push_from_checkpoint": "the critic's folder is pushed too",
    "_load_optimizer_and_scheduler": "the check that a checkpoint has a critic that fits",
}
"""Method of GRPOTrainer, or of transformers' Trainer under it -> what the override adds."""

RELIED_ON: dict[str, Callable[..., Any]] = {
    "Trainer._load_scaler": Trainer._load_scaler,
    "Trainer.log": Trainer.log,
    "integrations.deepspeed_load_checkpoint": deepspeed_load_checkpoint,
    "GRPOTrainer._calculate_rewards": GRPOTrainer._calculate_rewards,
    "GRPOTrainer._tokenize_prompts": GRPOTrainer._tokenize_prompts,
    "GRPOTrainer._log_metric": GRPOTrainer._log_metric,
    "SyncRefModelCallback.on_step_end": SyncRefModelCallback.on_step_end,
    "VLLMGeneration._iter_named_params": VLLMGeneration._iter_named_params,
    "VLLMGeneration.generate": VLLMGeneration.generate,
    "VLLMGeneration.sync_weights": VLLMGeneration.sync_weights,
    "VLLMClient.generate": VLLMClient.generate,
    "trainer.utils.add_fused_lm_head": trainer_utils.add_fused_lm_head,
    "models.utils._unwrap_model_for_generation": inspect.unwrap(model_utils._unwrap_model_for_generation),
    "trainer.utils.shuffle_sequence_dict": trainer_utils.shuffle_sequence_dict,
    "trainer.utils.split_tensor_dict": trainer_utils.split_tensor_dict,
}

BODIES = {f"GRPOTrainer.{name}": getattr(GRPOTrainer, name) for name in OVERRIDDEN} | RELIED_ON


class _WithoutDocstrings(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]


def normalized(code: str) -> str:
    """The same code without comments, docstrings and layout, as this version of Python writes it."""
    return ast.unparse(_WithoutDocstrings().visit(ast.parse(textwrap.dedent(code))))


def installed(name: str) -> str:
    return normalized(inspect.getsource(inspect.unwrap(BODIES[name])))


def kept(name: str) -> Path:
    return FOLDER / f"{name}.py"


def difference(name: str) -> str:
    """What has changed in a body since it was read, line by line; empty where nothing has."""
    before, now = normalized(kept(name).read_text()), installed(name)
    if before == now:
        return ""
    lines = difflib.unified_diff(
        laid_out(before).splitlines(), laid_out(now).splitlines(), "as it was read", "as it is installed", lineterm=""
    )
    return "\n".join(lines)


def laid_out(code: str) -> str:
    """In short lines, for a reader."""
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", "119", "-"]
    return subprocess.run(command, input=code, capture_output=True, text=True, check=True).stdout


def header(name: str) -> str:
    package = BODIES[name].__module__.partition(".")[0]
    version = {"trl": trl, "transformers": transformers}[package].__version__
    return (
        f"# An excerpt of {package} {version}, {BODIES[name].__module__}: copyright The HuggingFace Team, licensed\n"
        "# under the Apache License, Version 2.0. Changed: no comments, no docstrings, another layout.\n\n"
    )


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.py"):
        path.unlink()
    for name in BODIES:
        kept(name).write_text(header(name) + laid_out(installed(name)))


if __name__ == "__main__":
    main()
