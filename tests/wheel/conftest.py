"""The distributions, built once for all tests of this folder, and kept if `--distributions` names a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.wheel.environments import PIP, ROOT, Built, new_environment, run

SOURCES = ("LICENSE", "README.md", "accelerate_configs", "pyproject.toml", "recipes", "src")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--distributions", type=Path, help="where wheel and source archive go")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Built:
    """From a copy of the repository: a build leaves files beside the sources, and reads what an earlier one left."""
    folder = tmp_path_factory.mktemp("built")
    clone = folder / "clone"
    clone.mkdir()
    for source in (ROOT / name for name in SOURCES):
        if source.is_dir():
            leftovers = shutil.ignore_patterns("*.egg-info", "__pycache__")
            shutil.copytree(source, clone / source.name, symlinks=True, ignore=leftovers)
        else:
            shutil.copy(source, clone)
    tools = new_environment(folder / "tools")
    run(folder, tools, *PIP, "build", "twine")
    dist = pytestconfig.getoption("--distributions", None) or folder / "dist"
    run(folder, tools, "-m", "build", "--outdir", dist, clone)
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    return Built(clone, tools, sdist, wheel)
