"""The README's example, as it stands, on small files in the same schema."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import sorl_trl
from tests.agents import agent_policy, agent_tokenizer

ROOT = Path(__file__).parents[2]


class SmallConfig(sorl_trl.SOGRPOConfig):
    """What a test needs: the CPU and one short step."""

    def __init__(self, output_dir: str, max_completion_length: int) -> None:
        small = {"max_steps": 1, "num_generations": 4, "per_device_train_batch_size": 4, "report_to": "none"}
        super().__init__(output_dir, max_completion_length=48, use_cpu=True, bf16=False, **small)


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    agent_policy().save_pretrained("policy")
    agent_tokenizer().save_pretrained("policy")
    corpus = [{"id": "0", "title": "Oslo", "content": "where oslo"}]
    questions = [{"id": str(i), "question": "where oslo", "golden_answers": ["oslo"]} for i in range(8)]
    for name, rows in (("corpus", corpus), ("questions", questions)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    [example] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    example = example.replace("Qwen/Qwen2.5-3B", "policy")
    monkeypatch.setattr(sorl_trl.trainers, "SOGRPOConfig", SmallConfig)
    namespace: dict[str, object] = {}
    exec(example, namespace)
    assert namespace["trainer"].state.global_step == 1  # type: ignore[attr-defined]
