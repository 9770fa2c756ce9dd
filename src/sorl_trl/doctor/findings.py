"""What the doctor says, and how it is printed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

Level = Literal["error", "warning", "skipped", "ok"]
"""`error`: training would end, or learn nothing. `warning`: it would run, and worse than it could. `skipped`: not
looked at, for want of what another finding names. From the worst to the best."""
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True)
class Finding:
    """One thing that a check has seen."""

    level: Level
    what: str
    change: str = ""
    """The line of the recipe to change, as `RecipeFile.line` writes it; empty where no line would help."""
    check: str = ""
    """The name of the check, filled in by `examine`."""


class Unavailable(Exception):
    """What a check needs could not be had. The message names it; a finding of an earlier check says why."""


def format_findings(findings: Sequence[Finding]) -> str:
    """A list, worst first, and how many there are of each level."""
    width = max((len(finding.check) for finding in findings), default=0)
    shown = []
    for finding in sorted(findings, key=lambda each: LEVELS.index(each.level)):
        shown.append(f"{finding.level:8} {finding.check:{width}}  {finding.what}")
        if finding.change:
            shown.append(f"{'':8} {'':{width}}  -> {finding.change}")
    counts = Counter(finding.level for finding in findings)
    return "\n".join([*shown, "", ", ".join(f"{level}: {counts[level]}" for level in LEVELS)])


def to_json(recipe: str, findings: Sequence[Finding]) -> str:
    """One JSON object: the recipe's path, the findings in the order of the checks, and how many of each level."""
    counts = Counter(finding.level for finding in findings)
    record = {
        "recipe": recipe,
        "counts": {level: counts[level] for level in LEVELS},
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(record, indent=2, ensure_ascii=False)
