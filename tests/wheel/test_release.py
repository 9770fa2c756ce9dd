"""What `make release` refuses."""

from __future__ import annotations

import pytest

from tests.wheel.release import mistake

CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2026-01-31\n\n### Added\n"
CITATION = "type: software\nversion: 1.2.0\nlicense: Apache-2.0\n"


def test_a_version_that_is_ready() -> None:
    assert mistake("1.2.0", CHANGELOG, CITATION, "") is None


@pytest.mark.parametrize(
    ("version", "changelog", "citation", "uncommitted", "named"),
    [
        ("1.2.0", CHANGELOG, CITATION, " M README.md\n?? notes.txt\n", "README.md, notes.txt"),
        ("1.3.0", CHANGELOG, CITATION, "", "[1.3.0]"),
        ("1.2.0", CHANGELOG.replace(" - 2026-01-31", ""), CITATION, "", "YYYY-MM-DD"),
        ("1.2.0", CHANGELOG, CITATION.replace("1.2.0", "1.1.0"), "", "CITATION.cff"),
    ],
)
def test_a_mistake_is_one_line(version: str, changelog: str, citation: str, uncommitted: str, named: str) -> None:
    line = mistake(version, changelog, citation, uncommitted)
    assert line
    assert named in line
    assert "\n" not in line
