"""Every launch configuration is read by accelerate's own launcher, and matches its name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from tests.distributed.launch import CONFIGS, ROOT

OURS = ROOT / "accelerate_configs"
# name: (distributed type, ZeRO stage)
KINDS = {
    "single": ("NO", None),
    "ddp": ("MULTI_GPU", None),
    "zero1": ("DEEPSPEED", 1),
    "zero2": ("DEEPSPEED", 2),
    "zero3": ("DEEPSPEED", 3),
    "fsdp2": ("FSDP", None),
}
FILES = {path.stem: path for folder in (OURS, CONFIGS) for path in sorted(folder.glob("*.yaml"))}


def deepspeed_json(config: Any) -> dict[str, Any]:
    path = config.deepspeed_config.get("deepspeed_config_file")
    return json.loads((ROOT / path).read_text())["zero_optimization"] if path else {}


@pytest.mark.parametrize("name", FILES)
def test_matches_its_name(name: str) -> None:
    config = load_config_from_file(str(FILES[name]))
    kind, stage = KINDS[name.removesuffix("_cpu").removesuffix("_two_machines")]
    on_cpu = name.endswith("_cpu")
    assert config.distributed_type == kind
    assert config.deepspeed_config.get("zero_stage", deepspeed_json(config).get("stage")) == stage
    assert config.num_machines == (2 if "two_machines" in name else 1)
    assert config.num_processes == (1 if kind == "NO" else 2 if on_cpu else 8)
    has_json = "deepspeed_config_file" in config.deepspeed_config  # which sets it, or nothing does
    assert config.mixed_precision == (None if has_json else "no" if on_cpu else "bf16")
    assert config.use_cpu == (name == "single_cpu")


@pytest.mark.parametrize("name", FILES)
def test_the_launcher_knows_every_key(name: str) -> None:
    """It ignores what it does not know under `deepspeed_config` and `fsdp_config`, silently."""
    path = str(FILES[name])
    args = launch_command_parser().parse_args(["--config_file", path, "train.py"])
    config = load_config_from_file(path)
    assert {*config.deepspeed_config, *config.fsdp_config} <= set(vars(args))
    args, _, _ = _validate_launch_command(args)
    launchers = {"NO": None, "MULTI_GPU": "multi_gpu", "DEEPSPEED": "use_deepspeed", "FSDP": "use_fsdp"}
    used = [launcher for launcher in filter(None, launchers.values()) if getattr(args, launcher)]
    assert used == list(filter(None, [launchers[config.distributed_type]]))


@pytest.mark.parametrize("name", ["zero3", "zero3_cpu", "zero3_two_machines_cpu"])
def test_zero3_saves_whole_checkpoints(name: str) -> None:
    config = load_config_from_file(str(FILES[name]))
    gathers = config.deepspeed_config.get("zero3_save_16bit_model")
    assert gathers or deepspeed_json(config)["stage3_gather_16bit_weights_on_model_save"]
