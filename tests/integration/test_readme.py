"""The README's example, as it stands, on small files in the same schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sorl_trl
from tests.agents import agent_policy, agent_tokenizer

ROOT = Path(__file__).parents[2]


def small(config_class: type[Any]) -> Callable[..., Any]:
    """`config_class` with what a test needs: the CPU and one short step."""

    def config(output_dir: str, max_completion_length: int, steps_per_generation: int) -> Any:
        fields = {"max_steps": 1, "num_generations": 4, "per_device_train_batch_size": 4, "report_to": "none"}
        fields["steps_per_generation"] = steps_per_generation
        return config_class(output_dir, max_completion_length=48, use_cpu=True, bf16=False, **fields)

    return config


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    agent_policy().save_pretrained("policy")
    agent_tokenizer().save_pretrained("policy")
    corpus = [{"id": "0", "title": "Oslo", "content": "where oslo"}]
    questions = [{"id": str(i), "question": "where oslo", "golden_answers": ["oslo"]} for i in range(8)]
    for name, rows in (("corpus", corpus), ("questions", questions)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    for name in ("SOGRPOConfig", "SOPPOConfig"):
        monkeypatch.setattr(sorl_trl.trainers, name, small(getattr(sorl_trl, name)))
    namespace: dict[str, Any] = {}
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for example in examples:
        exec(example.replace("Qwen/Qwen2.5-3B", "policy"), namespace)
        assert namespace["trainer"].state.global_step == 1
    assert len(examples) == 2
    assert namespace["critic"].head.hidden_size == 16
