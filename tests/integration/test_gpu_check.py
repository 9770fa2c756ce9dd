"""The command for a machine with a GPU, on the CPU: every check but those that need the GPU itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu_check import command, engines
from benchmarks.gpu_check.command import END_S, NAMES, NO_GPU, Report, main
from benchmarks.gpu_check.equality import SMALL, check_equal, compared, loss_and_gradients
from benchmarks.gpu_check.meters import Stopwatch, peak_mib
from benchmarks.gpu_check.records import Context, Record, Skipped
from benchmarks.gpu_check.training import STEPS, check_moved, training_figures
from benchmarks.gpu_check.worker import check_engine
from benchmarks.overhead import build

ROOT = Path(__file__).parents[2]
IN_PROCESSES = ("zero2", "zero3")
"""They are launched, which takes longer."""


def result_of(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """All of the file, and its records by name."""
    result = json.loads(path.read_text())
    assert result.keys() == {"status", "device", "versions", "checks"}
    for record in result["checks"]:
        assert record.keys() == {"name", "status", "seconds", "figures", "reason"}
        assert (record["reason"] == "") == (record["status"] == "ok"), record
    return result, {record["name"]: record for record in result["checks"]}


def context(folder: Path) -> Context:
    return Context("cpu", small=True, folder=folder, deadline=time.monotonic() + 60)


def test_without_a_gpu_all_is_skipped(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-m", "benchmarks.gpu_check", "--output", str(tmp_path / "result.json")]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"gpu_check skipped: {NO_GPU}. {tmp_path / 'result.json'} says so.\n"
    result, records = result_of(tmp_path / "result.json")
    assert (result["status"], result["device"], tuple(records)) == ("skipped", None, NAMES)
    assert {(record["status"], record["reason"]) for record in records.values()} == {("skipped", NO_GPU)}


@pytest.mark.slow
def test_what_a_cpu_can_check(tmp_path: Path) -> None:
    names = [name for name in NAMES if name not in IN_PROCESSES]
    output = tmp_path / "result.json"
    assert main(["--device", "cpu", "--output", str(output), "--only", *names]) == 0
    result, records = result_of(output)
    assert (result["status"], result["device"], list(records)) == ("ok", "cpu", names)
    assert result["versions"]["torch"] == torch.__version__
    statuses = {name: record["status"] for name, record in records.items()}
    assert statuses == {**dict.fromkeys(names, "ok"), "fsdp2": "skipped", "vllm_colocate": "skipped"}
    figures = {name: record["figures"] for name, record in records.items()}
    for name in names[:5]:
        assert len(figures[name]["losses"]) == STEPS
        assert figures[name]["ratio_error_at_age_0"] < 0.05
        assert figures[name]["kl_to_old"][1] > 0, "the policy did not move between two updates"
    assert figures["losses_as_on_cpu"]["SO-GRPO"]["loss_difference"] == 0
    for cost in ("overhead", "critic_cost"):
        assert figures[cost]["timer"].startswith("time.perf_counter")
    assert figures["overhead"]["SO-GRPO"]["memory_ratio"] == pytest.approx(1, abs=0.1)
    assert figures["overhead"]["SO-GRPO"]["time_ratio"]["median"] > 0
    assert figures["critic_cost"]["model"]["memory_ratio"] > 1.2


@pytest.mark.distributed
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_engines_in_a_process_of_their_own(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    assert main(["--device", "cpu", "--output", str(output), "--only", *IN_PROCESSES]) == 0, output.read_text()
    _, records = result_of(output)
    assert [records[name]["figures"]["zero_stage"] for name in IN_PROCESSES] == [2, 3]
    assert all(records[name]["figures"]["processes"] == 1 for name in IN_PROCESSES)


class TestCommand:
    """What becomes of checks, whatever they check."""

    @pytest.fixture
    def checks(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """In the place of the first four."""
        checks: dict[str, Any] = dict.fromkeys(NAMES, lambda _: {"seen": 1})
        monkeypatch.setattr(command, "load_check", lambda name: checks[name])
        return checks

    def run(self, folder: Path, *words: str) -> tuple[int, dict[str, Any], dict[str, dict[str, Any]]]:
        code = main(["--device", "cpu", "--output", str(folder / "result.json"), *words])
        return code, *result_of(folder / "result.json")

    def test_a_failure_stops_no_other(self, tmp_path: Path, checks: dict[str, Any]) -> None:
        def fails(context: Context) -> dict[str, Any]:
            raise RuntimeError("CUDA error: an illegal memory access")

        def misses(context: Context) -> dict[str, Any]:
            raise Skipped("DeepSpeed is not installed")

        checks[NAMES[0]], checks[NAMES[1]] = fails, misses
        code, result, records = self.run(tmp_path)
        assert (code, result["status"]) == (1, "failed")
        statuses = [record["status"] for record in records.values()]
        assert statuses == ["failed", "skipped", *["ok"] * (len(NAMES) - 2)]
        assert records[NAMES[0]]["reason"].endswith("RuntimeError: CUDA error: an illegal memory access\n")
        assert records[NAMES[1]]["reason"] == "DeepSpeed is not installed"
        assert records[NAMES[2]]["figures"] == {"seen": 1}

    def test_a_package_that_is_missing_fails_what_needs_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "benchmarks.gpu_check.costs", None)
        code, _, records = self.run(tmp_path, "--only", "overhead", "fsdp2")
        assert (code, records["overhead"]["status"], records["fsdp2"]["status"]) == (1, "failed", "skipped")
        assert "ModuleNotFoundError" in records["overhead"]["reason"]

    def test_no_check_begins_when_time_is_over(self, tmp_path: Path, checks: dict[str, Any]) -> None:
        checks[NAMES[0]] = lambda _: time.sleep(0.3) or {}
        code, _, records = self.run(tmp_path, "--budget_s", "0.25")
        assert code == 0
        assert [(r["status"], r["reason"]) for r in records.values()] == [
            ("ok", ""),
            *[("skipped", "out of time")] * (len(NAMES) - 1),
        ]

    def test_a_check_that_hangs_is_given_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def ended(code: int) -> None:
            raise SystemExit(code)

        monkeypatch.setattr(os, "_exit", ended)
        report = Report(tmp_path / "result.json", "cpu", NAMES[:3])
        report.add(Record(NAMES[0], "ok"))
        with pytest.raises(SystemExit, match="1"):
            report.give_up()
        _, records = result_of(tmp_path / "result.json")
        assert [record["status"] for record in records.values()] == ["ok", "failed", "skipped"]
        assert records[NAMES[1]]["reason"] == f"not finished when {END_S:.0f} s were over"
        assert 60 * 8 > END_S > command.BUDGET_S


class TestProcesses:
    def run(self, folder: Path, script: str, limit_s: float) -> str:
        return engines._run([sys.executable, "-c", script], folder / "log", limit_s, engines.environment("cpu"))

    def test_is_ended_in_time(self, tmp_path: Path) -> None:
        assert self.run(tmp_path, "import time; time.sleep(600)", 0.5) == "The process was stopped after 0 s"

    def test_finds_what_is_not_installed(self, tmp_path: Path) -> None:
        script = "import benchmarks.gpu_check, sorl_trl; print(sorl_trl.__file__)"
        assert self.run(tmp_path, script, 60) == "The process ended with exit code 0"
        assert (tmp_path / "log").read_text().strip() == str(ROOT / "src/sorl_trl/__init__.py")

    def test_that_leaves_no_result_fails_with_its_output(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(engines, "_run", lambda *_: (tmp_path / "output.txt").write_text("no GPU") and "It ended")
        with pytest.raises(AssertionError, match=r"It ended and left no result. Its output ends in:\nno GPU"):
            engines._in_a_process(context(tmp_path), "zero2", [])

    @pytest.mark.parametrize(
        ("engine", "facts"),
        [
            ("zero3", {"zero_stage": 2, "parameters": ["Parameter"]}),
            ("fsdp2", {"zero_stage": 0, "parameters": ["Parameter"]}),
            ("vllm", {"zero_stage": 0, "parameters": ["DTensor"]}),
        ],
    )
    def test_another_engine_is_seen(self, engine: str, facts: dict[str, Any]) -> None:
        with pytest.raises(AssertionError, match=f"not {engine}"):
            check_engine(engine, facts)


class TestExpectations:
    """What would be wrong on a GPU is seen."""

    def test_other_losses_are_seen(self, tmp_path: Path) -> None:
        trainer = build("SO-GRPO", str(tmp_path), SMALL)
        loss, gradients, batch = loss_and_gradients(trainer)
        batch["old_per_token_logps"] = batch["old_per_token_logps"] + 1e-3
        row = compared(loss, gradients, *loss_and_gradients(build("SO-GRPO", str(tmp_path), SMALL), batch)[:2])
        with pytest.raises(AssertionError, match=r"SO-GRPO: `loss_difference` is .* more than 1e-05"):
            check_equal({"SO-GRPO": row})

    def test_losses_that_are_no_numbers_are_seen(self) -> None:
        with pytest.raises(AssertionError, match="is nan, more than"):
            check_equal({"SO-GRPO": {"loss_difference": float("nan"), "gradient_difference": 0.0}})

    def test_steps(self) -> None:
        step = {"step": 1, "loss": 0.1, "grad_norm": 1.0, "off_policy_age": 0, "kl_to_old": 0.0}
        steps = [{**step, "turns/ratio_min": 0.99, "turns/ratio_max": 1.02}] * STEPS
        assert training_figures(steps)["ratio_error_at_age_0"] == pytest.approx(0.02)
        with pytest.raises(AssertionError, match=f"{STEPS - 1} steps were logged, not {STEPS}"):
            training_figures(steps[1:])
        with pytest.raises(AssertionError, match="`grad_norm` is nan in step 1"):
            training_figures([{**steps[0], "grad_norm": float("nan")}, *steps[1:]])

    def test_weights(self) -> None:
        before = {"layer": torch.zeros(2), "critic.head.weight": torch.zeros(2)}
        moved = {name: weight + 1 for name, weight in before.items()}
        check_moved(before, moved, critic=True)
        with pytest.raises(AssertionError, match="no weight of the policy"):
            check_moved(before, {**moved, "layer": before["layer"]}, critic=True)
        with pytest.raises(AssertionError, match="no weight of the critic"):
            check_moved(before, {**moved, "critic.head.weight": torch.zeros(2)}, critic=True)
        with pytest.raises(AssertionError, match=r"no numbers: \['layer'\]"):
            check_moved(before, {**moved, "layer": torch.full((2,), torch.nan)}, critic=True)


class TestMeters:
    def test_time_on_a_cpu(self) -> None:
        with Stopwatch("cpu") as watch:
            time.sleep(0.02)
        assert watch.seconds >= 0.02

    def test_memory_on_a_cpu(self) -> None:
        weight = torch.zeros(2**18)  # 1 MiB
        assert peak_mib("cpu", lambda: weight + 1, lambda: [weight]) == 2.0
