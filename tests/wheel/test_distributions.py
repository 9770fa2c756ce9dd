"""What would be uploaded: sdist, wheel and editable install hold what the repository has."""

from __future__ import annotations

import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from tests.wheel.environments import EXTRAS, ROOT, Built, run

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


def test_the_metadata(built: Built) -> None:
    content = in_wheel(built.wheel)
    info = next(name for name in content if name.endswith("/METADATA")).removesuffix("METADATA")
    metadata = message_from_bytes(content[f"{info}METADATA"])
    assert (metadata["Name"], metadata["License-Expression"]) == ("sorl-trl", "Apache-2.0")
    assert {*EXTRAS.split(",")} <= {*metadata.get_all("Provides-Extra", [])}
    assert content[f"{info}licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert b"sorl = sorl_trl.cli.main:main" in content[f"{info}entry_points.txt"]
