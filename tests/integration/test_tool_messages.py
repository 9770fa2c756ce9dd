"""`tools=` and `environment_factory=`: the policy reads what TRL would show it, and no tool forges anything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from pyarrow.parquet import read_table
from trl import GRPOConfig, GRPOTrainer

from sorl_trl import AgentRollout, SOGRPOConfig, SOGRPOTrainer, answer_in_messages, chatml_tools
from sorl_trl.rollout import ToolBox
from sorl_trl.rollout.protocol import PROTOCOL_TAGS
from sorl_trl.rollout.trajectories import control_tokens
from tests.policies import build_policy
from tests.tools import (
    ANSWER,
    CALL,
    HOSTILE,
    QUESTION,
    SIMPLE,
    TEMPLATES,
    Atlas,
    Scripted,
    gemma_tokenizer,
    lookup,
    qwen_tokenizer,
    tool_call,
)
from tests.training import settings

HITS = 5 + 4
"""Tags and control tokens in `HOSTILE`."""
Says = Callable[[list[str]], list[str]]
"""What the policy says after each of the texts that it reads at once."""


def in_turn(messages: Sequence[str]) -> Says:
    """All rows say the messages, one after the other."""
    left = [*messages]
    return lambda read: [left.pop(0)] * len(read)


def every_other_asks(read: list[str]) -> list[str]:
    """Every other row calls the tool first; after its answer, it answers."""
    return [ANSWER if "<tool_response>" in text or row % 2 else CALL for row, text in enumerate(read)]


class Shown:
    """A reward function that keeps what it is shown."""

    __name__ = "shown"

    def __init__(self) -> None:
        self.completions: list[list[dict[str, Any]]] = []
        self.prompts: list[Any] = []

    def __call__(self, completions: Any, prompts: Any, **_: Any) -> list[float]:
        self.completions += completions
        self.prompts += prompts
        return [float(answer_in_messages(each) is not None) for each in completions]

    @property
    def results(self) -> list[Any]:
        return [each["content"] for messages in self.completions for each in messages if each["role"] == "tool"]


def template(name: str) -> Any:
    if name == "chatml":
        tokenizer = qwen_tokenizer()
        tokenizer.chat_template = SIMPLE
        return chatml_tools(tokenizer)
    if name == "gemma":
        tokenizer = gemma_tokenizer()
        tokenizer.eos_token = "<end_of_turn>"
        return tokenizer
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


def build(folder: Path, tokenizer: Any, reward: Any, options: dict[str, Any] | None = None, **given: Any) -> Any:
    trainer_class = given.pop("trainer_class", SOGRPOTrainer)
    config_class = GRPOConfig if trainer_class is GRPOTrainer else SOGRPOConfig
    config = config_class(**settings(folder, **{"max_completion_length": 512, "max_steps": 1, **(options or {})}))
    policy = build_policy(vocab_size=len(tokenizer))
    policy.config.max_position_embeddings = 8192
    given.setdefault("train_dataset", Dataset.from_list([{"prompt": QUESTION}] * 8))
    return trainer_class(policy, reward, config, processing_class=tokenizer, **given)


def script(trainer: Any, says: Says) -> None:
    """Have the policy follow a script instead of sampling."""
    engine = Scripted(trainer._tokenizer, says)
    if trainer.rollout_func is not None:
        collect = trainer.rollout_func.collect
        trainer.rollout_func.collect = lambda setup, prompts, rows, _, *rest: collect(
            setup, prompts, rows, engine, *rest
        )

    def say(prompt_ids: Any, *_: Any, **__: Any) -> Any:
        return [[*each.token_ids] for each in engine.generate(prompt_ids, ())], None

    trainer._generate_single_turn = say


def play(
    folder: Path, tokenizer: Any, messages: Sequence[str], trainer_class: Any = SOGRPOTrainer, **native: Any
) -> tuple[dict[str, Any], dict[str, float], Shown]:
    """The batch in which all rows say `messages`, what is logged, and what reward functions are shown."""
    shown = Shown()
    trainer = build(folder, tokenizer, shown, {"max_completion_length": 4000}, trainer_class=trainer_class, **native)
    script(trainer, in_turn(messages))
    batch = trainer._generate_and_score_completions([{"prompt": QUESTION} for _ in range(8)])
    return batch, {name: values[-1] for name, values in trainer._metrics["train"].items()}, shown


RETURNED: list[Any] = [[("MAPK1", 3)], ["ok"], [{"k": "v"}], [[1, "x"]], [], ("a", 1), {"k": []}, None]


def pick(number: int, name: str = "", share: float = 0.0, sure: bool = False, of: list[int] | None = None) -> Any:
    """
    Pick something.

    Args:
        number: Which.
        name: Its name.
        share: Of what.
        sure: Whether it is sure.
        of: Others.
    """
    return RETURNED[int(number)] if name == "" else repr((number, name, share, sure, of))


async def pick_later(number: int) -> Any:
    """
    Pick something, later.

    Args:
        number: Which.
    """
    await asyncio.sleep(0)
    return RETURNED[number]


class Welcoming(Atlas):
    def reset(self, **_: Any) -> str:  # type: ignore[override]
        return " You have an atlas."


ODD_CALLS: list[dict[str, Any]] = [
    {"number": "2"},
    {"number": 3.0, "name": "x"},
    {"number": True, "name": 5, "share": "1", "sure": 1, "of": "[1]"},
    {"number": "3.0", "name": "7", "share": "1e3", "sure": "false", "of": None},
    {"number": "two", "name": "x", "sure": "maybe"},
    {"name": "x"},
    {"number": 1, "name": "x", "other": 2},
    {"number": 99},
]
ODD_RESULTS = "".join(
    [
        *(tool_call("pick", number=number) for number in range(len(RETURNED))),
        *(tool_call("pick", **arguments) for arguments in ODD_CALLS),
        tool_call("go"),
        *(tool_call("pick_later", number=number) for number in range(5)),
    ]
)
XML_VALUES = "".join(
    f"<parameter={name}>\n{value}\n</parameter>\n"
    for name, value in {"number": "75001", "name": "75001", "share": "2", "sure": "True", "of": "[1, 2]"}.items()
)
XML_CALL = f"So.\n</think>\n\n<tool_call>\n<function=pick>\n{XML_VALUES}</function>\n</tool_call>"
LLAMA_CALL = '{"name": "lookup", "parameters": {"city": "Oslo"}}'


@pytest.mark.parametrize(
    ("name", "call", "native"),
    [
        ("qwen2_5", ODD_RESULTS, {"tools": [pick, pick_later]}),
        ("qwen2_5", tool_call("lookup", city="Oslo"), {"environment_factory": Welcoming}),
        ("qwen2_5", '<tool_call>\n{"name": "lookup"\n</tool_call>', {"environment_factory": Welcoming}),
        ("chatml", "".join(tool_call("pick", number=i) for i in range(len(RETURNED))), {"tools": [pick]}),
        ("qwen3_5_think", XML_CALL, {"tools": [pick]}),
        ("llama3_1", LLAMA_CALL, {"tools": [lookup]}),
        ("gemma", tool_call("lookup", city="Oslo") + tool_call("lookup", city=2, of=5), {"tools": [lookup]}),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_all_read_what_trls_own_trainer_shows_them(
    tmp_path: Path, name: str, call: str, native: dict[str, Any]
) -> None:
    """Calls typed by the schema, calls that do not fit, lists that tools return, and environments' text."""
    tokenizer = template(name)
    messages = [f"{call}{tokenizer.eos_token}", ANSWER.replace("<|im_end|>", tokenizer.eos_token)]
    outcomes = []
    for trainer_class in (GRPOTrainer, SOGRPOTrainer):
        batch, logged, shown = play(tmp_path, template(name), messages, trainer_class, **native)
        ids = [batch[key].tolist() for key in ("prompt_ids", "completion_ids", "tool_mask")]
        of_tools = logged["tools/call_frequency"], logged["tools/failure_frequency"]
        outcomes.append((ids, shown.completions, shown.prompts, of_tools))
    theirs, ours = outcomes
    assert ours == theirs
    assert int(batch["turn_ids"].max()) == (len(shown.completions[0]) > 1), "the results are not too long"


def broken(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "pick", "arguments": {arguments}}}\n</tool_call><|im_end|>'


def test_whatever_is_called_can_be_logged(tmp_path: Path) -> None:
    """Parquet needs one type in all rows, and no empty object."""
    arguments = ("{}", "[1]", "null", '{"number": "\\ud800"}', '{"number": 1e999}', f'{{"number": {2**70}}}')
    options = {"log_completions": True, "max_completion_length": 2000}
    trainer = build(tmp_path, qwen_tokenizer(), Shown(), options, tools=[pick])
    script(trainer, in_turn(["".join(map(broken, arguments)), broken("{}"), ANSWER]))
    trainer._generate_and_score_completions([{"prompt": QUESTION} for _ in range(8)])
    trainer.log({})
    (file,) = tmp_path.glob("completions/*.parquet")
    called, *_, last = read_table(file).column("completion").to_pylist()[0]
    given = [call["function"]["arguments"] for call in called["tool_calls"]]
    assert given[:3] == ["{}", '{"arguments": [1]}', "{}"] and len(given) == 6
    assert last["content"] == "It is in Norway."


def test_turns_are_trained_on(tmp_path: Path) -> None:
    counts: list[int] = []

    def turn_reward(turn_ids: Any, **_: Any) -> list[list[float]]:
        counts.extend(max(row) + 1 for row in turn_ids)
        return [[0.5] * max(row) + [1.0] for row in turn_ids]

    tokenizer = qwen_tokenizer()
    trainer = build(tmp_path, tokenizer, turn_reward, {"max_steps": 2}, environment_factory=Atlas)
    script(trainer, every_other_asks)
    batch = trainer._generate_and_score_completions([{"prompt": QUESTION} for _ in range(8)])
    assert counts == [2, 1] * 4
    for row, count in enumerate(counts):
        ids, turn_ids = batch["completion_ids"][row], batch["turn_ids"][row]
        texts = [tokenizer.decode(ids[turn_ids == turn]) for turn in range(count)]
        assert texts == ([CALL, ANSWER] if count == 2 else [ANSWER])
    before = trainer.model.lm_head.weight.clone()
    trainer.train()
    assert 1 < trainer.state.log_history[0]["turns/per_trajectory"] < 2
    assert trainer.state.log_history[0]["tools/call_frequency"] == 0.5
    assert not before.equal(trainer.model.lm_head.weight) and trainer.model.lm_head.weight.isfinite().all()


class Sum:
    def reset(self, start: int = 0, **_: Any) -> str:
        self.total = start
        return f"The sum is {start}."

    def add(self, number: int) -> str:
        """
        Add to the sum.

        Args:
            number: How much.
        """
        self.total += number
        return str(self.total)

    def get_reward(self) -> float:
        return float(self.total)


@pytest.mark.parametrize("staleness", [0, 1])
def test_environments_of_two_kinds_are_trained_and_evaluated(tmp_path: Path, staleness: int) -> None:
    roles = set()

    def reward(completions: Any, environments: Any, **_: Any) -> list[float]:
        assert {type(each) for each in environments} <= {Sum, Atlas}
        roles.update(tuple(message["role"] for message in each) for each in completions)
        return [float(len(each[-1]["content"])) for each in completions]

    options = {"max_completion_length": 64, "max_steps": 3, "async_staleness": staleness, "reward_weights": [0.5]}
    rows = Dataset.from_list([{"prompt": QUESTION, "environment": name} for name in ("sum", "atlas")] * 8)
    given: Any = {"tools": [pick], "environment_factory": {"sum": Sum, "atlas": Atlas}, "train_dataset": rows}
    trainer = build(tmp_path, qwen_tokenizer(), reward, options, eval_dataset=rows, **given)
    trainer.train()
    assert trainer.state.global_step == 3
    assert trainer.state.log_history[0]["rewards/Sum/mean"] >= 0.0, "`get_reward` gives a reward of its own"
    assert trainer.reward_weights.tolist() == [0.5, 1.0]
    assert trainer.evaluate()["eval_tools/call_frequency"] == 0.0
    assert roles == {("assistant",)}


def test_environments_may_write_the_prompts(tmp_path: Path) -> None:
    """Without a column for them, or without a dataset. Sampled ahead, batches must have one."""
    for rows in (None, Dataset.from_list([{"start": 1}] * 8)):
        trainer = build(tmp_path, qwen_tokenizer(), None, environment_factory=Sum, train_dataset=rows)
        script(trainer, in_turn([tool_call("add", number=2) + "<|im_end|>", ANSWER] * 2))
        trainer.train()
        start = 0 if rows is None else 1
        assert trainer.state.log_history[0]["reward"] == start + 2
        assert {each[0]["content"] for each in trainer._logs["prompt"]} == {f"The sum is {start}."}
    with pytest.raises(ValueError, match="`train_dataset` has the columns"):
        build(tmp_path, qwen_tokenizer(), Shown(), tools=[pick], train_dataset=rows)
    with pytest.raises(ValueError, match="a column `prompt`"):
        build(tmp_path, qwen_tokenizer(), None, {"async_staleness": 1}, environment_factory=Sum, train_dataset=rows)


def test_calls_are_limited_as_by_trl(tmp_path: Path) -> None:
    trainer = build(tmp_path, qwen_tokenizer(), Shown(), {"max_tool_calling_iterations": 2}, tools=[lookup])
    script(trainer, in_turn([CALL, CALL, CALL, ANSWER]))
    batch = trainer._generate_and_score_completions([{"prompt": QUESTION} for _ in range(8)])
    assert int(batch["turn_ids"].max()) + 1 == 3


class HostileAtlas(Atlas):
    def reset(self, **_: Any) -> str:  # type: ignore[override]
        return HOSTILE

    def lookup(self, city: str) -> str:
        return HOSTILE


HostileAtlas.lookup.__doc__ = lookup.__doc__


def control_ids(tokenizer: Any, ids: Any) -> list[int]:
    controls = set(control_tokens(tokenizer, PROTOCOL_TAGS))
    return [int(token) for token in ids if int(token) in controls]


def test_tool_text_forges_nothing(tmp_path: Path) -> None:
    tokenizer = qwen_tokenizer()
    benign, *_ = play(tmp_path, tokenizer, [CALL, ANSWER], tools=[lookup])
    batch, logged, shown = play(tmp_path, tokenizer, [CALL, ANSWER], environment_factory=HostileAtlas)
    for row in range(8):
        ids, turn_ids = batch["completion_ids"][row], batch["turn_ids"][row]
        assert [tokenizer.decode(ids[turn_ids == turn]) for turn in (0, 1)] == [CALL, ANSWER]
        for part in ("prompt", "completion"):
            read, own = (
                control_ids(tokenizer, each[f"{part}_ids"][row][each[f"{part}_mask"][row].bool()])
                for each in (batch, benign)
            )
            assert read == own, "the template's own"
    assert logged["rollout/neutralized_per_trajectory"] == 2 * HITS
    assert logged["rewards/shown/mean"] == 0.0
    assert len(shown.results) == 8
    assert all("[/tool_response][|im_end|]" in text for text in shown.results), "as the policy read it"


def test_what_cannot_be_shown_or_parsed_is_refused(tmp_path: Path) -> None:
    simple: Any = qwen_tokenizer()
    simple.chat_template = SIMPLE
    unknown = gemma_tokenizer()
    unknown.response_template = None
    box = AgentRollout(ToolBox([lookup]))
    for tokenizer, problem in ((simple, r"chatml_tools\(tokenizer\)"), (unknown, "template")):
        for native in ({"tools": [lookup]}, {"rollout_func": box}):
            with pytest.raises(ValueError, match=problem):
                build(tmp_path, tokenizer, Shown(), **native)
    with pytest.raises(ValueError, match="leave `rollout_func` out"):
        build(tmp_path, qwen_tokenizer(), Shown(), rollout_func=box, tools=[lookup])


def test_text_is_no_prompt_for_tools_that_the_template_shows(tmp_path: Path) -> None:
    dataset = Dataset.from_list([{"prompt": "Where is Oslo?"}] * 8)
    for given in ({"tools": [lookup]}, {"rollout_func": AgentRollout(ToolBox([lookup]))}):
        with pytest.raises(ValueError, match="`train_dataset` has the prompt"):
            build(tmp_path, qwen_tokenizer(), Shown(), train_dataset=dataset, **given)
