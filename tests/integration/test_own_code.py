"""A user's own reward, method, search engine, environment and agent, named in a recipe by their paths."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sorl_trl.cli import evaluate
from sorl_trl.cli.train import main as train
from sorl_trl.command_line import run_command
from sorl_trl.records.evaluated import read_evaluated
from tests.policies import CHAT, acting_policy, acting_tokenizer

OWN = """
import json
from dataclasses import dataclass
from urllib.request import Request, urlopen

from sorl_trl.methods import Method, PPOMin
from sorl_trl.rollout import Reply, TagProtocol
from sorl_trl.types import Passage, StopReason


def turns(trajectory, **_):
    return [float(len(each.turns)) for each in trajectory]


def number_of_row(number, **_):
    return [float(each) for each in number]


@dataclass(frozen=True)
class Signed:
    sign: float = 1.0

    def __call__(self, rollout):
        return self.sign * rollout.totals().unsqueeze(1) * rollout.turn_mask


method = Method(credit=Signed(2.0), surrogate=PPOMin(), name="mine")


class Search:
    def search_batch(self, queries, k):
        return [[Passage("1", "", "oslo")] for _ in queries]


class Game:
    protocol = TagProtocol(tools=("guess",))

    def reset(self, number):
        self.number, self.hits = number, 0
        return " 1"

    def step(self, turn):
        self.hits += turn.action.content == str(self.number)
        return Reply("2", reward=0.5, stop=StopReason.ENVIRONMENT_DONE if self.hits else None)

    def measures(self):
        return {"hits": self.hits}


def agent(example, endpoint):
    said = [{"role": "user", "content": example["question"]}]
    for _ in range(2):
        body = json.dumps({"model": "policy", "messages": said}).encode()
        headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
        with urlopen(Request(f"{endpoint.base_url}/chat/completions", body, headers)) as response:
            message = json.load(response)["choices"][0]["message"]
        said += [message, {"role": "user", "content": "2"}]
    return {"number": example["number"], "threes": sum(each["content"].count("3") for each in said[1:])}


def cached(example, endpoint, numbers=iter(range(8))):
    return {"number": 100} if next(numbers) % 2 else agent(example, endpoint)


def broken(example, endpoint):
    return agent(example, endpoint).missing
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own_code.py").write_text(OWN)
    yield tmp_path
    sys.modules.pop("own_code", None)


def write_recipe(policy: Any, tokenizer: Any, row: dict[str, Any], **settings: Any) -> list[str]:
    """Save the policy, eight rows, and a recipe of one step, and return the words that name it."""
    policy.save_pretrained("policy")
    tokenizer.save_pretrained("policy")
    Path("rows.jsonl").write_text("".join(json.dumps({**row, "id": i}) + "\n" for i in range(8)))
    recipe = {
        **{"model_name_or_path": "policy", "train_questions": "rows.jsonl", "output_dir": "out", "max_steps": 1},
        **{"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 24},
        **{"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"},
        **{"max_turn_tokens": 4, "max_observation_tokens": 6, **settings},
    }
    Path("recipe.yaml").write_text(
        yaml.safe_dump({name: value for name, value in recipe.items() if value is not None})
    )
    return ["--config", "recipe.yaml"]


def log() -> dict[str, Any]:
    """The metrics of the only step."""
    history: list[dict[str, Any]] = json.loads(Path("out/trainer_state.json").read_text())["log_history"]
    return next(entry for entry in history if "reward" in entry)


def evaluated(*words: str) -> list[dict[str, Any]]:
    evaluate.main(["out", "--questions", "rows.jsonl", *words])
    return list(read_evaluated("out/evaluation", "rows"))


def test_a_search_engine_a_method_and_rewards(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"question": "where", "golden_answers": ["oslo"]}
    own = {
        "search_backend": "own_code.Search",
        "method": {"credit": {"own_code.Signed": {"sign": -1.0}}},
        "rewards": ["exact_match", "own_code.turns"],
        "prompt_template": "{question}",
        "max_observation_tokens": 10,
    }
    tokenizer = acting_tokenizer(("search", "information"))
    words = write_recipe(acting_policy(tokenizer), tokenizer, row, **own)
    assert run_command(train, [*words, "--dry_run"]) == 0
    assert run_command(train, words) == 0
    assert log()["rewards/turns/mean"] > 1
    assert log()["rollout/searches_per_trajectory"] > 0
    assert "credit     Signed(sign=-1.0)" in capsys.readouterr().out
    rows = evaluated("--num_samples", "4", "--temperature", "1")
    passages = [segment["passages"] for row in rows for segment in row["segments"] if segment["passages"]]
    assert passages and all(found[0]["text"] == "oslo" for found in passages)
    assert json.loads(Path("out/evaluation/settings.json").read_text())["search"] == "own_code.Search"


def test_an_environment(folder: Path) -> None:
    tokenizer = acting_tokenizer(("guess",))
    row = {"prompt": "<guess>", "number": 3}
    own: dict[str, Any] = {"environment": "own_code.Game", "method": "own_code.method"}
    own["rewards"] = ["environment", "own_code.number_of_row"]
    words = write_recipe(acting_policy(tokenizer), tokenizer, row, **own)
    assert run_command(train, [*words, "--dry_run"]) == 0
    assert run_command(train, words) == 0
    assert log()["rewards/number_of_row/mean"] == 3
    assert log()["environment/reward"] > 0 < log()["rewards/environment_reward/mean"]
    rows = evaluated("--num_samples", "4", "--temperature", "1")
    assert {row["prompt"] for row in rows} == {"<guess> 1"}, "with the text of `reset`"
    measured = [json.loads(row["environment"]) for row in rows]
    assert sum(each["hits"] for each in measured) > 0
    rewards = [[segment["reward"] for segment in row["segments"] if segment["reward"]] for row in rows]
    assert [each.get("reward", 0) for each in measured] == [sum(each) for each in rewards]
    results = json.loads(Path("out/evaluation/results.json").read_text())
    assert results["datasets"]["rows"]["environment"]["hits"]["mean"] > 0


def test_an_agent(folder: Path) -> None:
    tokenizer = acting_tokenizer(("guess",))
    tokenizer.chat_template = CHAT
    row = {
        "question": "<guess>",
        "prompt": "1 " * 3000,
        "number": 3,
    }  # more than the window: it is the agent's to read
    words = write_recipe(acting_policy(tokenizer), tokenizer, row, agent="own_code:agent", max_observation_tokens=None)
    assert run_command(train, [*words, "--dry_run"]) == 0
    assert run_command(train, words) == 0
    assert (log()["turns/per_trajectory"], log()["agent/number"]) == (2, 3)
    assert log()["reward"] == log()["rewards/agent_reward/mean"] > 3

    rows = evaluated("--num_samples", "4", "--temperature", "1")
    assert {row["prompt"] for row in rows} == {"<guess> <eos>"}, "that of the first call"
    threes = [sum(segment["text"].count("3") for segment in row["segments"]) for row in rows]
    expected = [{"number": 3, "threes": each, "reward": 3 + each} for each in threes]
    assert [json.loads(row["environment"]) for row in rows] == expected and any(threes)
    assert {(row["correct"], row["exact_match"], row["searches"], row["turns"]) for row in rows} == {
        (None, None, None, 2)
    }


def test_trajectories_without_a_call_are_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = acting_tokenizer(("guess",))
    tokenizer.chat_template = CHAT
    write_recipe(acting_policy(tokenizer), tokenizer, {"question": "<guess>", "number": 3})
    words = ["--agent", "own_code:cached", "--max_turn_tokens", "4", "--output", "out"]
    with pytest.raises(SystemExit, match=r"^4 trajectories .*`no_call`"):
        evaluate.main(["policy", "--questions", "rows.jsonl", *words])
    results = json.loads(Path("out/results.json").read_text())["datasets"]["rows"]
    assert (results["masked"], results["stop_reasons"]["no_call"]) == (4, 0.5)
    assert results["environment"]["number"]["mean"] == 3


def test_an_agent_whose_every_run_raises(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = acting_tokenizer(("guess",))
    tokenizer.chat_template = CHAT
    row = {"question": "<guess>", "number": 3}
    words = write_recipe(
        acting_policy(tokenizer), tokenizer, row, agent="own_code:broken", max_observation_tokens=None
    )
    capsys.readouterr()
    place = f"own_code.py, line {OWN[: OWN.index('.missing')].count(chr(10)) + 1}"
    options = ["--agent", "own_code:broken", "--max_turn_tokens", "4"]
    evaluation = ["policy", "--questions", "rows.jsonl", "--output", "out", *options]
    for command, given in ((train, [*words, "--dry_run"]), (train, words), (evaluate.main, evaluation)):
        assert run_command(command, given) == 2
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err and "Ready" not in shown.out
        (line,) = [line for line in shown.err.splitlines() if line.startswith("error: ")]
        assert "AttributeError" in line and place in line


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"rewards": ["nowhere_at_all.reward"]}, "`rewards`"),
        ({"rewards": ["own_code.taste"]}, "`rewards`"),
        ({"rewards": ["exact_match"]}, "`rewards`"),  # without golden answers
        ({"method": "own_code.turns"}, "`method`"),
        ({"method": {"credit": {"own_code.Signed": {"volume": 1}}}}, "`method.credit."),
        ({"environment": "own_code.Search"}, "`environment`"),
        ({"environment": None, "search_backend": "own_code.Game"}, "`search_backend`"),
        ({"rollout_func": "own_code.rollout"}, "--rollout_func: it was removed"),
        ({"no_search": True}, "`no_search`"),
        ({"environment": None, "no_search": True, "rewards": ["own_code.number_of_row"]}, "needs `number`"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_argument(
    folder: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, Any], name: str
) -> None:
    tokenizer = acting_tokenizer(("guess",))
    own = {"environment": "own_code.Game", "rewards": ["environment"], **changed}
    row = {"prompt": "<guess>", "number": 3}
    if not own["environment"]:
        row = {"question": "guess", "golden_answers": ["3"]}
    words = write_recipe(acting_policy(tokenizer), tokenizer, row, **own)
    assert run_command(train, words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert name in line
    assert not Path("out").exists()
