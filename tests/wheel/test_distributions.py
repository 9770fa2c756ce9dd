"""What would be uploaded: sdist, wheel and editable install hold what the repository has."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.wheel.environments import ROOT, Built, run

DATA = ("recipes/*.yaml", "accelerate_configs/*.yaml")

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(1800)]


def data_files() -> dict[str, bytes]:
    """Path in the package -> content, as the repository has it."""
    return {str(path.relative_to(ROOT)): path.read_bytes() for glob in DATA for path in ROOT.glob(glob)}


def in_wheel(wheel: Path) -> dict[str, bytes]:
    """Path -> content."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_pypi_would_take_them(built: Built) -> None:
    shown = run(built.clone, built.tools, "-m", "twine", "check", "--strict", built.sdist, built.wheel)
    assert shown.count("PASSED") == 2


def test_the_wheel_has_the_package_and_nothing_else(built: Built) -> None:
    content = in_wheel(built.wheel)
    package = {name.removeprefix("sorl_trl/"): file for name, file in content.items() if name.startswith("sorl_trl/")}
    assert {name: package.get(name) for name in data_files()} == data_files()
    source = built.clone / "src/sorl_trl"
    assert {str(path.relative_to(source)) for path in source.rglob("*.py")} <= set(package)
    assert "py.typed" in package
    others = {name.split("/")[0] for name in content} - {"sorl_trl"}
    assert len(others) == 1
    assert others.pop().endswith(".dist-info")
