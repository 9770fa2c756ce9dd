"""What training was told, kept beside what it makes: reports read it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from sorl_trl.files import write_whole
from sorl_trl.recipe.arguments import Arguments
from sorl_trl.text import without_user

SECRET = "_token"
"""Names that end so are those of secrets, as in transformers."""

SETTINGS_FILE = "settings.json"
"""In the folder of the run."""


def set_fields(arguments: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not at their default, without secrets: tokens, and the users of URLs."""
    found = {}
    for field in dataclasses.fields(arguments):
        value = getattr(arguments, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if field.init and value != default and not field.name.endswith(SECRET):
            found[field.name] = without_user(value) if isinstance(value, str) else value
    return found


def settings_of(arguments: Arguments) -> dict[str, Any]:
    """The trainer, the method if one is named, and each other argument that is not at its default."""
    chosen = {"trainer": arguments.trainer.trainer}
    parts = (getattr(arguments, field.name) for field in dataclasses.fields(arguments))
    return chosen | {key: value for part in parts for key, value in set_fields(part).items()}


def write_settings(arguments: Arguments, folder: Path) -> None:
    """Write `settings.json` into the output folder of a run; made if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(settings_of(arguments), indent=2, ensure_ascii=False, default=str)
    write_whole(folder / SETTINGS_FILE, (text + "\n").encode("utf-8"))
