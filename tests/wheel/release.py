"""`make release`: builds what is uploaded, tests that, and says what is left to do. Needs PyPI."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest
import tomllib

from tests.wheel.environments import ROOT

DIST = ROOT / "dist"


def mistake(version: str, changelog: str, citation: str, uncommitted: str) -> str | None:
    """Why this version cannot be released, in one line."""
    if uncommitted:
        return "commit these first, or remove them: " + ", ".join(line[3:] for line in uncommitted.splitlines())
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, flags=re.MULTILINE):
        return f"CHANGELOG.md has no line '## [{version}] - YYYY-MM-DD', and pyproject.toml has this version"
    if f"\nversion: {version}\n" not in citation:
        return f"CITATION.cff has no line 'version: {version}', and pyproject.toml has this version"
    return None


def main() -> int | pytest.ExitCode:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    changelog, citation = ((ROOT / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff"))
    uncommitted = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    if found := mistake(version, changelog, citation, uncommitted):
        sys.exit(f"No release: {found}.")
    shutil.rmtree(DIST, ignore_errors=True)
    if failed := pytest.main([str(ROOT / "tests/wheel"), f"--distributions={DIST}"]):
        return failed
    print(f"""
dist/ has what these tests have run. Left to do by hand:

  git tag -a v{version} -m 'sorl-trl {version}' && git push origin v{version}
  python -m pip install twine && python -m twine upload dist/sorl_trl-{version}*""")
    return 0


if __name__ == "__main__":
    sys.exit(main())
