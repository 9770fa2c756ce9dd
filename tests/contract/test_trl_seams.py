"""The bodies of TRL and transformers that we override or rest on, read in trl 1.16.0 and transformers 5.23.

A body that changes fails here first: read it, adapt what rests on it, and add its new hash to its set, as
`python -m tests.contract.test_trl_seams` prints it. A set has a hash of each body that was read, of every version that
the package takes. `python -m tests.contract.drift` compares another source tree. Comments, docstrings and layout do
not count.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import shutil
import textwrap
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import transformers
import trl
from trl import GRPOTrainer

from sorl_trl import SOGRPOTrainer, SOPPOTrainer
from sorl_trl.experimental import GroupRefillTrainer

OURS = (SOGRPOTrainer, SOPPOTrainer, GroupRefillTrainer)
OVERRIDDEN = {
    "trl:GRPOTrainer._clip_grad_norm": {"9cfad6062fd3835b"},
    "trl:GRPOTrainer._compute_loss": {"f6b6366f4bb7515d"},
    "trl:GRPOTrainer._generate_and_score_completions": {"d668c0acfdb311b8"},
    "trl:GRPOTrainer._get_train_sampler": {"9675fa694edb53aa"},
    "trl:GRPOTrainer._load_best_model": {"41d254e48fa633bb"},
    "trl:GRPOTrainer._load_from_checkpoint": {"ed32ce6faf29519b"},
    "trl:GRPOTrainer._prepare_inputs": {"b77e2140367a9a7d"},
    "trl:GRPOTrainer._run_epoch": {"756d63c46201affc"},
    "trl:GRPOTrainer._save": {"c4a3f0b0ebafc493"},
    "trl:GRPOTrainer._save_checkpoint": {"22af0c7c579b77fb"},
    "trl:GRPOTrainer.create_optimizer": {"60fe92fa5a7a1f16"},
    "trl:GRPOTrainer.log": {"9afed6e81fcaa128"},
    "trl:GRPOTrainer.train": {"a050a3bd5da5ee44"},
}
"""Each body that we override, to the first 16 digits of the SHA-256 of what was read."""
RELIED_ON = {
    # Calling rollouts and rewards, encoding and logging as TRL does.
    "trl:GRPOTrainer._calculate_rewards": {"4c66445bf52d726a"},
    "trl:GRPOTrainer._generate": {"5f57e70d7e3a9f03"},
    "trl:GRPOTrainer._log_metric": {"3023e26467c6d90f"},
    "trl:GRPOTrainer._tokenize_prompts": {"83f93c43265e66e9"},
    # Parsing messages: it takes a ValueError for text without calls.
    "trl.chat_template_utils:parse_response": {"87d6ef151623d412"},
    # Reading rows in chunks, with `LaidOut` in place of the model.
    "trl:GRPOTrainer._get_per_token_logps_and_entropies": {"796113cec15a741f"},
    "trl.trainer.utils:add_fused_lm_head": {"e95cef3f560a3fbb"},
    # Masks and weights of the loss.
    "trl:GRPOTrainer.get_high_entropy_mask": {"a487c8645bc29317"},
    "trl:GRPOTrainer.get_off_policy_mask": {"cbd80498a5204fbb"},
    # Splitting a rollout.
    "trl.trainer.utils:shuffle_sequence_dict": {"5d27e84cc54e95cd"},
    "trl.trainer.utils:split_tensor_dict": {"637cf2357191965d"},
    # Gathering sharded parameters.
    "trl.models.utils:_unwrap_model_for_generation": {"db86ab98d204115d"},
    # vLLM: `PolicyGeneration` replaces the class while a trainer is built, and sends no critic.
    "trl.generation.vllm_generation:VLLMGeneration._init_vllm": {"da18fa6ef45cf006"},
    "trl.generation.vllm_generation:VLLMGeneration._iter_named_params": {"3cf9c78911630941"},
    "trl.generation.vllm_generation:VLLMGeneration.generate": {"bc1767e81d2624dd"},
    "trl.generation.vllm_generation:VLLMGeneration.sync_weights": {"5c09888febfccb68"},
    # A server: `WeightClient` pauses it around updates and counts versions.
    "trl.generation.vllm_client:VLLMClient._finish_weight_update": {"1043c5b06f372048"},
    "trl.generation.vllm_client:VLLMClient.generate": {"06b564b91032739e"},
    "trl.generation.vllm_client:VLLMClient.reset_prefix_cache": {"9389b9b4b47f3ec8"},
    "trl.generation.vllm_client:VLLMClient.update_named_params": {"2dfb66bd20f5708a"},
    # The tests of a server.
    "trl.generation.vllm_client:VLLMClient._start_weight_update": {"400261c143a02f09"},
    "trl.generation.vllm_client:VLLMClient.init_communicator": {"73133c3aceb8f2b8"},
    # Hiding the critic; the guard; gradients on several meshes.
    "trl.trainer.callbacks:SyncRefModelCallback.on_step_end": {"9188791b5c3e4313"},
    "transformers:Trainer.log": {"bfef50c056d9537e"},
    # Naming the metrics of several evaluation sets.
    "transformers:Trainer.evaluate": {"d98295d9960ddca6"},
    "transformers:Trainer._has_mixed_mesh_grads": {"3989094eae1988ed"},
}
"""Bodies that we call, or rest on otherwise, and for what.

`trainers/host.py` lists the attributes of the trainer that we read and write, which have no body.
`split_pixel_values_by_grid` splits images.
"""
READ = OVERRIDDEN | RELIED_ON


def overridden() -> set[str]:
    """Every method of TRL's trainer, or of transformers' under it, that a trainer of ours has too."""
    classes = {each for trainer in OURS for each in trainer.__mro__ if each.__module__.startswith("sorl_trl.")}
    names = {name for each in classes for name in vars(each) if inspect.isfunction(getattr(GRPOTrainer, name, None))}
    return {f"trl:GRPOTrainer.{name}" for name in names - {"__init__"}}


def hash_of(code: str) -> str:
    """Of what the code does."""
    return hashlib.sha256(repr(_shape(ast.parse(textwrap.dedent(code)))).encode()).hexdigest()[:16]


def _shape(node: Any) -> Any:
    """A syntax tree as every version of Python has it: without docstrings, and without fields that are empty."""
    if isinstance(node, list):
        return [_shape(each) for each in node]
    if not isinstance(node, ast.AST):
        return node
    values = dict(ast.iter_fields(node))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
        values["body"] = node.body[1:]
    return type(node).__name__, [(name, _shape(value)) for name, value in values.items() if value not in (None, [])]


def installed(name: str) -> str:
    return hash_of(inspect.getsource(inspect.unwrap(resolve_name(name))))


def test_every_override_was_read() -> None:
    assert overridden() == set(OVERRIDDEN)


@pytest.mark.parametrize("name", READ)
def test_the_body_is_the_one_that_was_read(name: str) -> None:
    if installed(name) not in READ[name]:
        pytest.fail(
            f"{name} was read in trl 1.16.0 and transformers 5.23, and is another one in trl {trl.__version__} and "
            f"transformers {transformers.__version__}. Read it, adapt what rests on it, and add the hash that "
            "`python -m tests.contract.test_trl_seams` prints to its set.",
            pytrace=False,
        )


def test_another_tree_is_compared_without_being_imported(tmp_path: Path) -> None:
    """The installed one does not differ; in a copy, one body is another and one is gone."""
    from tests.contract.drift import drift  # which reads this module

    installed_tree = Path(trl.__file__).parent
    assert drift(installed_tree) == {}
    tree = tmp_path / "trl"
    shutil.copytree(installed_tree, tree, ignore=shutil.ignore_patterns("__pycache__"))
    trainer = tree / "trainer" / "grpo_trainer.py"
    text = trainer.read_text().replace("def _log_metric(", "def _log_another_metric(")
    trainer.write_text(text.replace("def _compute_loss(self, model, inputs):", "def _compute_loss(self, model, it):"))
    found = drift(tree)
    assert found.keys() == {"trl:GRPOTrainer._compute_loss", "trl:GRPOTrainer._log_metric"}
    assert found["trl:GRPOTrainer._log_metric"] == "gone"


if __name__ == "__main__":
    for each in sorted(overridden() | set(READ)):
        print(f'    "{each}": {{"{installed(each)}"}},')
