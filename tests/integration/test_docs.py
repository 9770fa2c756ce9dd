"""The Python of the README, the how-to pages and others, page by page, as it stands, with a tiny policy."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.chat_template_utils import is_chat_template_prefix_preserving

from sorl_trl import SearchRollout, SOGRPOConfig, SOGRPOTrainer
from sorl_trl.qa import build_prompt_rows, exact_match_reward, load_questions
from sorl_trl.rollout import LockStepEngine, policy_rollout
from sorl_trl.search import BM25Index
from tests.agents import build_agent
from tests.documentation import ROOT, logged, run_blocks, set_stage, small
from tests.endpoint import tokenizer_of
from tests.policies import build_policy
from tests.tools import Scripted, qwen_tokenizer

HOW_TO = ROOT / "docs" / "how_to"


@pytest.fixture(autouse=True)
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_stage(monkeypatch, tmp_path)


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those that a page has trained."""
    found: list[Any] = []
    train = SOGRPOTrainer.train

    def recording(self: Any, *arguments: Any, **named: Any) -> Any:
        found.append(self)
        return train(self, *arguments, **named)

    monkeypatch.setattr(SOGRPOTrainer, "train", recording)
    return found


def save_chat(monkeypatch: pytest.MonkeyPatch, call: dict[str, Any], answer: str) -> None:
    """A chat model, `chat`; in the place of its sampling, every trajectory calls a tool and then answers."""
    tokenizer = qwen_tokenizer()
    build_policy(vocab_size=len(tokenizer)).save_pretrained("chat")
    tokenizer.save_pretrained("chat")
    first = f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>"

    def says(read: list[str]) -> list[str]:
        return [f"{answer}<|im_end|>" if "<tool_response>" in text else first for text in read]

    engine: Any = LockStepEngine(Scripted(tokenizer, says))
    monkeypatch.setattr(policy_rollout, "policy_engine", lambda *_: nullcontext((engine, bool)))


def test_readme(monkeypatch: pytest.MonkeyPatch, trainers: list[Any]) -> None:
    save_chat(monkeypatch, {"name": "multiply", "arguments": {"a": 101, "b": 201}}, "It is 345,117.")
    row = {"prompt": [{"role": "user", "content": "What is 101 * 201 * 17?"}], "answer": "345117"}
    args = small(SOGRPOConfig)("out-agent", max_completion_length=1024, steps_per_generation=8)
    names = run_blocks(ROOT / "README.md", "chat", args=args, dataset=Dataset.from_list([row] * 8))
    assert logged(trainers[0], "endpoint/error_share") == 0
    assert logged(trainers[1], "tools/call_frequency") == 1
    assert names["correct"]([[{"content": "It is 345,117."}]] * 2, ["345117", "345118"]) == [1, 0]


def test_critic() -> None:
    given = {"dataset": Dataset.from_list(build_prompt_rows(load_questions("questions.jsonl")))}
    given |= {"rollout": SearchRollout(BM25Index.open("corpus.jsonl", "index")), "reward": exact_match_reward}
    names = run_blocks(HOW_TO / "critic.md", model="policy", **given)
    assert names["critic"].head.weight.shape == (1, 16)
    assert json.loads(Path("out-ppo/critic/critic_config.json").read_text())["kind"] == "adapter"


def test_environment() -> None:
    run_blocks(HOW_TO / "environment.md")
    assert json.loads(Path("games.jsonl").read_text().splitlines()[-1])["number"] == 1


def test_extending(trainers: list[Any]) -> None:
    run_blocks(ROOT / "docs" / "internals" / "extending.md")
    assert [logged(each, "turns/per_trajectory") for each in trainers] == [2, 2]
    assert trainers[1]._buffered_inputs[0]["context_ids"].min() == -1


def test_train_your_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that thinks gets a template that keeps thoughts, and imitates a conversation."""
    tokenizer = tokenizer_of("qwen3")
    build_policy(vocab_size=len(tokenizer)).save_pretrained("chat")
    tokenizer.save_pretrained("chat")
    monkeypatch.setattr(trl, "SFTConfig", small(trl.SFTConfig))
    names = run_blocks(ROOT / "docs" / "train_your_agent.md", "chat")
    assert is_chat_template_prefix_preserving(names["tokenizer"]) and not is_chat_template_prefix_preserving(tokenizer)
    assert logged(names["imitation"], "train_loss") > 0
    assert "I need the country." in tokenizer.decode(names["imitation"].train_dataset[0]["input_ids"])
    assert Path("warm-start/chat_template.jinja").read_text() == tokenizer.chat_template


def test_endpoint() -> None:
    rows = [
        {"prompt": "", "question": f"where {name}", "answer": name} for name in ("oslo", "bern", "lima", "rome") * 2
    ]
    trainer = run_blocks(HOW_TO / "endpoint.md", model="policy", dataset=Dataset.from_list(rows))["trainer"]
    trainer.train()
    assert logged(trainer, "turns/per_trajectory") == 1


def test_tools(monkeypatch: pytest.MonkeyPatch, trainers: list[Any]) -> None:
    """Every trajectory searches and then answers; `games` has no tool of that name."""
    save_chat(monkeypatch, {"name": "search", "arguments": {"query": "oslo"}}, "<answer>423000</answer>")
    monkeypatch.setattr(trl, "GRPOConfig", small(trl.GRPOConfig))
    names = run_blocks(HOW_TO / "tools.md", "chat")
    native, box, games = trainers
    plain = names["trainer"]
    assert type(plain) is trl.GRPOTrainer
    for trainer in (native, box, plain):
        assert logged(trainer, "reward") == logged(trainer, "tools/call_frequency") == 1
    assert logged(games, "rewards/GuessingGame/mean") == 0
    assert names["run_python"]("print(1 + 1)") == "2\n"


def test_resume() -> None:
    trainer = run_blocks(HOW_TO / "resume.md")["trainer"]
    assert trainer.state.global_step == trainer.args.max_steps == 1, "the run was finished"
    trainer.args.max_steps = 2
    trainer.train(resume_from_checkpoint="out/checkpoint-1")
    assert trainer.state.log_history[-1]["off_policy_age"] == 1  # with the trajectories of the first run


def test_search() -> None:
    names = run_blocks(HOW_TO / "search.md")
    assert names["rollout"].search is names["glossary"]
    (oslo,), nothing = names["glossary"].search_batch([" OSLO ", "nowhere"], k=1)
    assert (oslo.text, nothing) == ("Oslo is the capital of Norway.", [])
    with pytest.raises(names["SearchError"]):
        names["glossary"].search_batch(["o" * 1001], k=1)


def test_debug(tmp_path: Path) -> None:
    """A checkpoint with LoRA becomes a model that says the same, and a guard watches."""
    config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)
    adapter = get_peft_model(AutoModelForCausalLM.from_pretrained("policy"), config)
    for each in (adapter, AutoTokenizer.from_pretrained("policy")):
        each.save_pretrained("runs/mine/checkpoint-200")
    trainer = build_agent(tmp_path, save_strategy="steps", save_steps=1, max_steps=2)
    run_blocks(HOW_TO / "debug.md", trainer=trainer)
    merged, ids = AutoModelForCausalLM.from_pretrained("runs/merged"), torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(merged(ids).logits, adapter(ids).logits)
    trainer.train()
    assert trainer.state.global_step == 2
