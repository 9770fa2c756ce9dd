"""Environments that know nothing of the repository, and commands run in them. Needs PyPI."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt"))
EXTRAS = "serve"
HIDDEN = ("PYTHONPATH", "VIRTUAL_ENV", "DS_ACCELERATOR", "TRL_EXPERIMENTAL_SILENCE")
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def surroundings() -> dict[str, str]:
    """The variables of this process without those that lead to the repository."""
    return {name: value for name, value in os.environ.items() if name not in HIDDEN} | OFFLINE


def run(cwd: Path, *command: str | Path, code: int = 0) -> str:
    """Run to the end; the output of both streams."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=surroundings(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == code, f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-4000:]}"
    return done.stdout


def new_environment(folder: Path) -> Path:
    """The interpreter of an environment that has pip alone."""
    run(folder.parent, sys.executable, "-m", "venv", folder)
    return folder / "bin/python"


@dataclass(frozen=True)
class Built:
    clone: Path
    tools: Path
    """An interpreter with `build` and `twine`."""
    sdist: Path
    wheel: Path
    """Made from the sdist."""


@dataclass(frozen=True)
class Home:
    """An empty folder, and the `sorl` of an environment that has the wheel."""

    folder: Path
    command: Path

    def sorl(self, *words: str | Path, code: int = 0) -> str:
        return run(self.folder, self.command, *words, code=code)
