"""The scripts of examples/, as they stand, with tiny policies: each trains one step."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from sorl_trl.command_line import UserMistake
from sorl_trl.endpoint import command_agent
from sorl_trl.records.view import write_page
from sorl_trl.search import BM25Index
from sorl_trl.types import Action, ActionKind, Observation, StopReason, Trajectory, Turn
from tests.agents import agent_policy, agent_tokenizer
from tests.documentation import ROOT, logged, write_questions
from tests.endpoint import Ran, run_agent, tokenizer_of
from tests.policies import DIGITS, acting_policy, acting_tokenizer, build_policy, word_tokenizer
from tests.tools import SIMPLE, qwen_tokenizer, tool_call

STEP = ["--max_steps", "1", "--per_device_train_batch_size", "4", "--num_generations", "4"]
QUICK = [*STEP, "--use_cpu", "--bf16", "False", "--report_to", "none", "--model", "policy"]
BRIEF = ["--steps_per_generation", "1"]
SEARCH = ["--questions", "questions.jsonl", "--corpus", "corpus.jsonl", "--index", "index"]
CHAT = "{% for message in messages %}{{ message.content }} {% endfor %}"


@pytest.fixture(autouse=True)
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_questions()


def run(monkeypatch: pytest.MonkeyPatch, name: str, policy: Any, tokenizer: Any, *words: str) -> Any:
    """Run a script as a user would, with a policy that is saved first, and return its trainer."""
    policy.save_pretrained("policy")
    tokenizer.save_pretrained("policy")
    script = str(ROOT / "examples" / f"{name}.py")
    monkeypatch.setattr("sys.argv", [script, *QUICK, *words])
    trainer = runpy.run_path(script, run_name="__main__")["trainer"]
    assert trainer.state.global_step == 1
    return trainer


@pytest.mark.parametrize(
    ("name", "words", "metric"),
    [
        ("own_reward", ["--reward_weights", "1.0", "0.5", "0.5"], "rewards/found_answer/mean"),
        ("own_method", [], "stay_close"),
        ("ppo", [], "critic/value_loss"),
    ],
)
def test_search_agents(monkeypatch: pytest.MonkeyPatch, name: str, words: list[str], metric: str) -> None:
    short = ["--max_completion_length", "48"]
    trainer = run(monkeypatch, name, agent_policy(), agent_tokenizer(), *SEARCH, *short, *words)
    assert logged(trainer, metric) >= 0


def test_the_first_turn_that_found_an_answer_is_paid() -> None:
    found_answer = runpy.run_path(str(ROOT / "examples" / "own_reward.py"))["found_answer"]
    turn = Turn((1,), "", Action(ActionKind.SEARCH, "query"))
    seen = [Observation((2,), text) for text in ("Rome only.", "It is (Paris).", "Paris")]
    segments = (*(each for pair in zip([turn] * 3, seen, strict=True) for each in pair), turn)
    trajectory = Trajectory((0,), segments, StopReason.MAX_TURNS)
    assert found_answer([trajectory], [["Paris"]]) == [[0.0, 0.1, 0.0, 0.0]]


def test_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = qwen_tokenizer()
    policy = build_policy(vocab_size=len(tokenizer))
    trainer = run(monkeypatch, "swap", policy, tokenizer, "--rows", "8", "--max_completion_length", "8")
    assert logged(trainer, "rewards/right/mean") == 0
    assert logged(trainer, "tools/call_frequency") == 0


def test_langgraph_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("langchain", "langchain_openai"):
        pytest.importorskip(module)
    world = Path("runs/langgraph/world")
    world.mkdir(parents=True)
    Path("questions.jsonl").rename(world / "train.jsonl")
    Path("corpus.jsonl").rename(world / "corpus.jsonl")
    tokenizer = qwen_tokenizer()
    policy = build_policy(vocab_size=len(tokenizer))
    policy.config.max_position_embeddings = 4096
    trainer = run(monkeypatch, "langgraph_agent", policy, tokenizer, "--max_completion_length", "48")
    assert logged(trainer, "endpoint/error_share") == 0
    assert 0 <= logged(trainer, "rewards/agent_reward/mean") <= 1


def test_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = acting_tokenizer(("guess",))
    tokenizer.chat_template = CHAT
    trainer = run(monkeypatch, "own_environment", acting_policy(tokenizer), tokenizer, "--rows", "8")
    assert logged(trainer, "rollout/tool_calls_per_trajectory") > 0
    assert -0.4 <= logged(trainer, "rewards/environment_reward/mean") <= 1


def test_search_team(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a policy that mostly writes a tag, a word and a tag, a third of the verifier's turns says no."""
    names = [f"<{slash}{name}>" for slash in ("", "/") for name in ("verify", "search", "answer")]
    tokenizer = word_tokenizer(["<pad>", "<eos>", "<unk>", *names, *DIGITS, "no"])
    tokenizer.chat_template = CHAT
    policy, words = acting_policy(tokenizer), tokenizer.get_vocab()
    follows = {"<verify>": "no", "no": "</verify>", **dict.fromkeys(names[3:], "<eos>")}
    for word, after in follows.items():
        policy.lm_head.weight.data[:, words[word]] = 0
        policy.lm_head.weight.data[words[after], words[word]] = 6
    brief = ["--questions", "questions.jsonl", "--corpus", "corpus.jsonl", "--index", "index"]
    trainer = run(monkeypatch, "search_team", policy, tokenizer, *brief, "--max_completion_length", "400")
    shares = [logged(trainer, f"agents/{name}/turn_share") for name in ("verifier", "searcher", "answerer")]
    assert min(shares) > 0 and sum(shares) == pytest.approx(1)


def test_a_team_searches_until_it_knows_enough_or_may_not() -> None:
    team = runpy.run_path(str(ROOT / "examples" / "search_team.py"))["SearchTeam"](
        BM25Index.open("corpus.jsonl", "index")
    )

    def play(*turns: str) -> list[str]:
        """Whose turns they are, and what is found."""
        heard = [team.reset(["Oslo"])]
        agents = []
        for text in turns:
            assert heard[-1].endswith(f"You are the {team.agent}.")
            agents.append(team.agent)
            reply = team.step(Turn((1,), text, Action(ActionKind.MESSAGE, text)))
            heard.append(reply.text)
        assert reply.stop is StopReason.ENVIRONMENT_DONE
        return agents + [text.partition("\n")[0] for text in heard[1:] if text.partition("\n")[0]]

    no, search, answer = "<verify> no </verify>", "<search>oslo</search>", "I say <answer> oslo </answer>"
    assert play("<verify>perhaps</verify>", answer) == ["verifier", "answerer"] and team.solved
    assert play(no, search, "yes", "Oslo") == ["verifier", "searcher", "verifier", "answerer", "where oslo"]
    assert not team.solved
    longest = play(no, search, no, "oslo", no, search, answer)
    assert longest == [*["verifier", "searcher"] * 3, "answerer", "where oslo", "nothing", "where oslo"]


def run_script(name: str, turns: list[str]) -> Ran:
    """Have the agent of a script answer a question; `turns` is what the policy says."""
    agent = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["agent_with"](
        BM25Index.open("corpus.jsonl", "index")
    )
    example = {"prompt": "Which city?", "golden_answers": ["Oslo"]}
    return run_agent(agent, example, qwen_tokenizer(), lambda read, number: turns[number])


def test_two_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    tokenizer = qwen_tokenizer()
    trainer = run(monkeypatch, "two_agents", build_policy(vocab_size=len(tokenizer)), tokenizer, *SEARCH, *BRIEF)
    assert logged(trainer, "rewards/agent_reward/mean") == 0


@pytest.fixture
def my_agent(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script that readers copy, as a module, with its questions and its corpus where it looks for them."""
    pytest.importorskip("openai")
    from examples import train_my_agent

    world = Path(train_my_agent.WORLD)
    world.mkdir(parents=True)
    for source, name in (("questions", "train"), ("questions", "eval"), ("corpus", "corpus")):
        shutil.copy(f"{source}.jsonl", world / f"{name}.jsonl")
    monkeypatch.setattr(train_my_agent, "open_index", BM25Index.open)  # not the one of another test
    return train_my_agent


def test_train_my_agent(monkeypatch: pytest.MonkeyPatch, my_agent: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """With LoRA, and evaluated before and after; it saves an adapter, checkpoints and what `sorl view` shows."""
    tokenizer = qwen_tokenizer()
    policy = build_policy(vocab_size=len(tokenizer))
    policy.config.max_position_embeddings = 4096
    words = ["--gradient_accumulation_steps", "1", "--dtype", "float32", "--max_turn_tokens", "16"]
    words += ["--max_completion_length", "64", "--output_dir", "out", "--save_trajectories_steps", "1"]
    script = [word.replace("--model", "--model_name_or_path") for word in QUICK]
    monkeypatch.setattr(f"{__name__}.QUICK", script)
    trainer = run(monkeypatch, "train_my_agent", policy, tokenizer, *BRIEF, *words)
    log = json.loads(Path("out/trainer_state.json").read_text())["log_history"]
    assert [each["eval_reward"] for each in log if "eval_reward" in each] == [0, 0]
    assert "Held-out reward: 0.000 (step 0) → 0.000 (step 1), +0.000" in capsys.readouterr().out
    assert logged(trainer, "turns/per_trajectory") >= 1
    assert Path("out/adapter_model.safetensors").exists() and Path("out/checkpoint-1").is_dir()
    assert trainer.args.save_steps < 200 and write_page(Path("out"), Path("page.html"))[0] == 4


def test_a_model_without_tools_is_refused_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch, my_agent: Any) -> None:
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = SIMPLE
    tokenizer.save_pretrained("policy")  # alone: there are no weights
    script = str(ROOT / "examples" / "train_my_agent.py")
    monkeypatch.setattr("sys.argv", [script, "--model_name_or_path", "policy", "--use_cpu", "--bf16", "False"])
    with pytest.raises(ValueError, match=r"chatml_tools\(tokenizer\)"):
        runpy.run_path(script, run_name="__main__")


def test_the_flagship(tmp_path: Path) -> None:
    """What `make flagship` runs on a CPU, with a model whose template shows no tools."""
    pytest.importorskip("openai")
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = SIMPLE
    tokenizer.save_pretrained("policy")
    policy = build_policy(vocab_size=len(tokenizer))
    policy.config.max_position_embeddings = 4096
    policy.save_pretrained("policy")
    given = ["--model", str(tmp_path / "policy"), "--output", str(tmp_path / "out"), "--max_steps", "5"]
    command = [sys.executable, "-m", "examples.flagship", *given]
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:]
    page = Path("out/README.md").read_text()
    assert page.startswith("# A CPU run of a small model, which shows the path, not the result: ")
    assert re.search(r"\| Held-out reward \| \d\.\d+ \(step 0\) → \d\.\d+ \(step 5\), .+ 32 questions\)", page)
    assert re.search(
        r"\| Peak memory \| generating (?!0\.0)\S+ GiB, training (?!0\.0)\S+ GiB, otherwise .+ GiB \|", page
    )
    assert re.search(r"\| Tokens sampled a second \| [\d,]+, mean of 2 rollouts \|", page)
    assert f"torch {torch.__version__}" in page and "python examples/train_my_agent.py --model_name_or_path" in page
    assert page.count("Held-out reward") == 2, "in the table, and in the log"
    assert Path("out/reward.svg").read_text().count("<path") > 5
    assert Path("out/adapter_model.safetensors").exists() and "step 0" in Path("out/log.txt").read_text()
    assert write_page(Path("out"), Path("page.html"))[0] > 0, "as the page says, there are trajectories"


@pytest.mark.parametrize(
    ("gib", "more", "problem"),
    [
        (10, [], "a step needs about"),
        (23.5, [], "--vllm_gpu_memory_utilization 0.4"),
        (23.5, ["--vllm_gpu_memory_utilization", "0.46"], None),
        (79.1, [], None),
    ],
)
def test_the_flagship_checks_the_memory_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, gib: float, more: list[str], problem: str | None
) -> None:
    """For a model of Qwen3-4B's shape, of which there is only the config."""
    from examples import flagship

    shape = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
    AutoConfig.for_model("qwen3", **shape, num_key_value_heads=8, tie_word_embeddings=True).save_pretrained("policy")
    words = ["--model_name_or_path", "policy", "--use_cpu", *flagship.ON_GPU.split(), *more]
    args, config, model = flagship.train_my_agent.options(words)
    on_gpu = SimpleNamespace(**vars(config) | {"device": torch.device("cuda"), "world_size": 1})
    monkeypatch.setattr(flagship.train_my_agent, "options", lambda _: (args, on_gpu, model))
    monkeypatch.setattr(flagship, "available_bytes", lambda device: gib * 2**30)
    with pytest.raises(UserMistake, match=problem) if problem else nullcontext():
        flagship.check_memory(words)


def test_my_agent_thinks_and_searches(my_agent: Any) -> None:
    """Its thoughts stay in the context, because the results of tools are no new message of the user."""
    tokenizer = tokenizer_of("qwen3")
    turns = [f"<think>\nI look.\n</think>\n\n{tool_call('search', query='oslo')}", "<think>\nSo.\n</think>\n\nOslo"]
    example = {"question": "Which city?", "golden_answers": ["Oslo"]}
    ran = run_agent(my_agent.agent, example, tokenizer, lambda read, number: turns[number])
    assert (ran.rewards, ran.counts) == ({"reward": 1.0}, (1, 0, 0))
    assert "I look." in ran.read[1] and "<tool_response>\nwhere oslo\n" in ran.read[1]


@pytest.mark.parametrize(("verdict", "reward"), [("Yes.", 1.0), ("no", 0.0), (None, None)])
def test_a_judge_decides_or_leaves_a_trajectory_out(
    monkeypatch: pytest.MonkeyPatch, my_agent: Any, verdict: str | None, reward: float | None
) -> None:
    client, asked = my_agent.AsyncOpenAI, list[Any]()

    class Judge:
        chat = property(lambda self: self)
        completions = property(lambda self: self)

        async def create(self, **request: Any) -> Any:
            asked.append(request)
            if verdict is None:
                raise my_agent.OpenAIError("overloaded")
            return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=verdict))])

    monkeypatch.setattr(my_agent, "AsyncOpenAI", lambda **options: client(**options) if options else Judge())
    example = {"question": "Which city?", "golden_answers": ["Oslo"]}
    monkeypatch.setattr(my_agent.args, "judge", "large")
    ran = run_agent(my_agent.agent, example, qwen_tokenizer(), lambda *_: "It is Oslo.")
    assert ran.rewards == (None if reward is None else {"reward": reward})
    assert asked[0]["model"] == "large" and "It is Oslo." in asked[0]["messages"][0]["content"]


def test_the_planner_asks_the_searcher() -> None:
    pytest.importorskip("openai")
    ran = run_script("two_agents", ["Where?", "Here, in Oslo.", "Answer: Oslo"])
    assert ran.rewards == {"reward": 1.0}
    assert [turn.agent for turn in ran.trajectory.turns] == ["planner", "searcher", "planner"]
    assert "where oslo" in ran.read[1]
    assert "Here, in Oslo." in ran.read[2]


def test_an_agent_goes_on_from_the_policys_summary() -> None:
    pytest.importorskip("openai")
    from examples.compacting_agent import agent_with

    turns = ["<search>oslo</search>", "It is Oslo.", "<answer> Oslo </answer>"]
    example = {"prompt": "Which city?", "golden_answers": ["Oslo"]}
    agent = agent_with(BM25Index.open("corpus.jsonl", "index"), longest=150)
    ran = run_agent(agent, example, qwen_tokenizer(), lambda read, number: turns[number])
    assert (ran.rewards, ran.counts) == ({"reward": 1.0}, (1, 0, 1))
    assert [turn.agent for turn in ran.trajectory.turns] == ["policy", "summary", "policy"]
    assert "where oslo" in ran.read[1] and "where oslo" not in ran.read[2]
    assert "It is Oslo." in ran.read[2]


def test_compacting_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    tokenizer = qwen_tokenizer()
    words = [*SEARCH, *BRIEF, "--longest", "100"]
    trainer = run(monkeypatch, "compacting_agent", build_policy(vocab_size=len(tokenizer)), tokenizer, *words)
    assert logged(trainer, "rewards/agent_reward/mean") == 0
    assert logged(trainer, "agents/summary/turn_share") > 0


@pytest.mark.agents
def test_the_code_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.sdks.policies import brief_policy, brief_tokenizer

    code = ["print(search(query='oslo'))", "final_answer('Oslo')"]
    ran = run_script("code_agent", [f"Thought: I look.\n<code>\n{each}\n</code>" for each in code])
    assert (ran.rewards, ran.counts) == ({"reward": 1.0}, (1, 0, 0))
    assert "where oslo" in ran.read[1]
    trainer = run(monkeypatch, "code_agent", brief_policy(brief_tokenizer()), brief_tokenizer(), *SEARCH, *BRIEF)
    assert logged(trainer, "rewards/agent_reward/mean") == 0
    assert logged(trainer, "endpoint/error_share") == 0


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_an_agent_in_javascript() -> None:
    agent = command_agent(f"node {ROOT / 'examples' / 'agent.mjs'}")
    ran = run_agent(agent, {"number": 7}, qwen_tokenizer(), lambda read, number: ["5", "9", "7"][number])
    assert (ran.rewards, ran.counts) == ({"reward": 1.0}, (2, 0, 0))
    assert "Higher." in ran.read[1]
    assert "Lower." in ran.read[2]


@pytest.mark.parametrize("steps", [8, pytest.param(240, marks=pytest.mark.slow)])
def test_the_notebook(steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Cell by cell; with all of its steps, the agent wins more games in the end, and the output is as it is stored."""
    cells = json.loads((ROOT / "examples" / "first_run.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert "max_steps=240" in code
    names: dict[str, Any] = {"__name__": "notebook"}
    exec(compile(code.replace("max_steps=240", f"max_steps={steps}"), "first_run.ipynb", "exec"), names)
    assert names["trainer"].state.global_step == steps
    rewards = names["rewards"]
    assert len(rewards) == steps // 8
    if steps == 240:
        assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5
        stored, shown = "".join(cells[-1]["outputs"][0]["text"]), capsys.readouterr().out
        assert re.sub(r"[\d█]+", "0", stored) in re.sub(r"[\d█]+", "0", shown)
