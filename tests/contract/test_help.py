"""Help is there at once: pages that are kept beside the code say what the code says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sorl_trl.cli.main import COMMANDS, HELP
from tests.help_pages import PAGES


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_what_the_arguments_say(name: str) -> None:
    page = (HELP / f"{name}.txt").read_text(encoding="utf-8")
    assert page.split() == PAGES[name]().split(), "`python -m tests.help_pages` writes them anew"


HELPS = [[], *([name, "--help"] for name in COMMANDS)]
WRONG_PATHS = [
    *(["evaluate", "nope"], ["compare", "nope", "nope"], ["report", "nope"], ["view", "nope"], ["recipes", "nope"]),
    *(
        ["evaluate", "org/model", "--output", "nope", "--corpus", "nope"],
        ["index", "--corpus", "nope", "--output", "x"],
    ),
    ["serve", "--index", "nope"],
    ["train", "--model_name_or_path", "./nope", "--train_questions", "nq"],
]


@pytest.mark.trains
@pytest.mark.parametrize("lines", [HELPS, WRONG_PATHS], ids=["help", "wrong paths"])
def test_help_and_wrong_paths_import_nothing_heavy(lines: list[list[str]]) -> None:
    """Which is what would make them slow."""
    code = (
        "import sys\nfrom sorl_trl.cli.main import main\n"
        f"for words in {lines}:\n"
        "    try:\n        main(words)\n    except SystemExit:\n        pass\n"
        "heavy = {'torch', 'transformers', 'trl', 'accelerate', 'datasets'} & {*sys.modules}\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
