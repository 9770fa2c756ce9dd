"""The command for a machine with a GPU, on the CPU: every check but those that need the GPU itself."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check.checks import COMPARED, check_equal, compared, loss_and_gradients
from benchmarks.overhead import build

LAUNCHED = ("zero2", "zero3")


def statuses(path: Path) -> dict[str, str]:
    return {record["name"]: record["status"] for record in json.loads(path.read_text())["checks"]}


def test_without_a_gpu_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--output", str(tmp_path / "result.json")]) == 0
    assert not (tmp_path / "result.json").exists(), "what a GPU once found stays"


@pytest.mark.slow
@pytest.mark.trains
def test_what_a_cpu_can_check(tmp_path: Path) -> None:
    names = [name for name in gpu_check.NAMES if name not in LAUNCHED]
    output = tmp_path / "result.json"
    assert gpu_check.main(["--device", "cpu", "--output", str(output), "--only", *names]) == 0, output.read_text()
    assert statuses(output) == dict.fromkeys(names, "ok") | dict.fromkeys(
        ("fsdp2", "vllm_colocate", "vllm_ahead"), "skipped"
    )


@pytest.mark.distributed
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_engines_in_a_process_of_their_own(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    assert gpu_check.main(["--device", "cpu", "--output", str(output), "--only", *LAUNCHED]) == 0, output.read_text()
    assert statuses(output) == dict.fromkeys(LAUNCHED, "ok")


def test_other_losses_are_seen(tmp_path: Path) -> None:
    loss, gradients, batch = loss_and_gradients(build("SO-GRPO", str(tmp_path), COMPARED[True]))
    batch["old_per_token_logps"] = batch["old_per_token_logps"] + 1e-3
    row = compared(loss, gradients, *loss_and_gradients(build("SO-GRPO", str(tmp_path), COMPARED[True]), batch)[:2])
    with pytest.raises(AssertionError, match=r"SO-GRPO: `loss_difference` is .* more than 1e-05"):
        check_equal({"SO-GRPO": row})
