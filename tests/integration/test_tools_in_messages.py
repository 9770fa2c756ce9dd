"""A `ToolBox` with a `ChatProtocol`: tools that the chat template shows, called as in TRL's own tool loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers.utils import DocstringParsingException
from trl import GRPOTrainer
from trl.chat_template_utils import add_response_schema

from sorl_trl import AgentRollout, SOGRPOConfig, SOGRPOTrainer, chatml_tools, search_tool
from sorl_trl.agents.chat import messages_of
from sorl_trl.rollout import ChatProtocol, Collector, Generation, RolloutLimits, ToolBox
from sorl_trl.rollout.trajectories import rollout_statistics
from sorl_trl.search import NoSearch
from sorl_trl.types import Action, ActionKind, StopReason, Trajectory, Turn
from tests.policies import build_policy
from tests.tools import (
    ANSWER,
    CALL,
    GEMMA_TOOLS,
    QUESTION,
    SIMPLE,
    Atlas,
    build,
    gemma_tokenizer,
    lookup,
    qwen_tokenizer,
    tool_call,
)
from tests.training import settings

TOKENIZER: Any = add_response_schema(qwen_tokenizer())
LIMITS = RolloutLimits(max_turns=4, max_turn_tokens=400, max_observation_tokens=400)
TWO_CALLS = f"Let me see.\n{tool_call('lookup', city='Oslo')}\n{tool_call('lookup', city='Rome')}<|im_end|>"


class Scripted:
    """In place of an engine: says the messages of a script, one after the other, to all rows."""

    window = None

    def __init__(self, *messages: str, tokenizer: Any = TOKENIZER) -> None:
        self.tokenizer = tokenizer
        self.messages = [tokenizer.encode(message, add_special_tokens=False) for message in messages]
        self.heard: list[str] = []

    def generate(self, contexts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> list[Generation]:
        ids = self.messages.pop(0)
        self.heard.append(self.tokenizer.decode(contexts[0]))
        return [Generation(tuple(ids), None, stopped=True) for _ in contexts]


def sample_from(trainer: Any, engine: Scripted) -> None:
    """Have the trainer's rollout sample from a script."""
    rollout = trainer.rollout_func.__wrapped__
    trainer.rollout_func = lambda prompts, of: rollout.sample(prompts, of, engine)


def template(name: str) -> Any:
    if name == "chatml":
        tokenizer = qwen_tokenizer()
        tokenizer.chat_template = SIMPLE
        return chatml_tools(tokenizer)
    if name == "gemma":
        tokenizer = gemma_tokenizer()
        tokenizer.eos_token = "<end_of_turn>"
        return tokenizer
    tokenizer: Any = qwen_tokenizer()
    tokenizer.chat_template = files("trl").joinpath(f"chat_templates/{name}.jinja").read_text()
    return tokenizer


def batch_of(trainer: Any) -> dict[str, Any]:
    batch: dict[str, Any] = trainer._generate_and_score_completions([{"prompt": QUESTION} for _ in range(8)])
    return batch


XML_CALL = "<tool_call>\n<function=lookup>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
JSON_TEMPLATES = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl")
XML_TEMPLATES = ("qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "nemotron_3_nano")


@pytest.mark.parametrize(
    ("name", "call", "native"),
    [
        *((name, CALL, {"tools": [lookup]}) for name in JSON_TEMPLATES),
        *((name, f"I see.\n</think>\n\n{XML_CALL}<|im_end|>", {"tools": [lookup]}) for name in XML_TEMPLATES),
        ("qwen2_5", TWO_CALLS, {"environment_factory": Atlas}),
        ("qwen2_5", '<tool_call>\n{"name": "lookup"\n</tool_call><|im_end|>', {"tools": [lookup]}),
    ],
)
def test_prompts_trajectories_and_messages_are_those_of_trls_tool_loop(
    tmp_path: Path, name: str, call: str, native: dict[str, Any]
) -> None:
    seen: list[Any] = []

    def reward(completions: Any, **_: Any) -> list[float]:
        seen.append(completions)
        return [0.0] * len(completions)

    said: list[str] = []

    def say(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        said.append(ANSWER if said else call)
        return [tokenizer.encode(said[-1], add_special_tokens=False) for _ in prompt_ids], None

    tokenizer = template(name)
    native_loop = build(tmp_path / "theirs", tokenizer, reward, **native)
    native_loop._generate_single_turn = say
    theirs = batch_of(native_loop)
    tokenizer = template(name)
    trainer = build(tmp_path / "ours", tokenizer, reward, options={"async_staleness": 1}, **native)
    sample_from(trainer, Scripted(call, ANSWER, tokenizer=tokenizer))
    trainer.model.eval()
    ours = batch_of(trainer)
    for key in ("prompt_ids", "completion_ids", "turn_ids"):
        assert ours[key].tolist() == theirs[key].tolist(), key
    assert seen[0] == seen[1]


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


class Picking:
    def reset(self, **_: Any) -> None: ...

    def pick(self, number: str) -> Any:
        """
        Pick what another environment picks by a number.

        Args:
            number: Which.
        """
        return [number]


class Counting(Picking):
    def pick(self, number: int) -> Any:  # type: ignore[override]
        """
        Count.

        Args:
            number: How far.
        """
        return [number]


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
XML_VALUES = "".join(
    f"<parameter={name}>\n{value}\n</parameter>\n"
    for name, value in {"number": "75001", "name": "75001", "share": "2", "sure": "True", "of": "[1, 2]"}.items()
)


ODD_RESULTS = "".join(
    [
        *(tool_call("pick", number=i) for i in range(len(RETURNED))),
        *(tool_call("pick", **each) for each in ODD_CALLS),
        *(tool_call("pick_later", number=i) for i in range(5)),
    ]
)


def read_and_shown(folder: Path, template_name: str, messages: Sequence[str], which: Any, **native: Any) -> Any:
    """What the policy reads and what reward functions are shown, with `which` trainer and `async_staleness`."""
    trainer_class, staleness = which
    seen, said, tokenizer = [], [*messages], template(template_name)

    def reward(completions: Any, **_: Any) -> list[float]:
        seen.extend(completions)
        return [0.0] * len(completions)

    def say(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        ids = tokenizer.encode(said.pop(0), add_special_tokens=False)
        return [[*ids] for _ in prompt_ids], None

    policy = build_policy(vocab_size=len(tokenizer))
    policy.config.max_position_embeddings = 8192
    options = {
        "max_completion_length": 4000,
        **({} if trainer_class is GRPOTrainer else {"async_staleness": staleness}),
    }
    trainer = build(folder, tokenizer, reward, options, trainer_class=trainer_class, policy=policy, **native)
    trainer._generate_single_turn = say
    if staleness:
        sample_from(trainer, Scripted(*messages, tokenizer=tokenizer))
    trainer.model.eval()
    kinds = [{"environment": "picking"}, {"environment": "counting"}] if "environment_factory" in native else [{}] * 2
    batch = trainer._generate_and_score_completions([{"prompt": QUESTION, **kind} for kind in kinds for _ in range(4)])
    return batch["completion_ids"].tolist(), seen


@pytest.mark.parametrize(
    ("name", "call", "native"),
    [
        ("qwen2_5", ODD_RESULTS, {"tools": [pick, pick_later]}),
        ("chatml", "".join(tool_call("pick", number=i) for i in range(len(RETURNED))), {"tools": [pick]}),
        (
            "qwen2_5",
            tool_call("pick", number="7") + tool_call("pick", number=7) + tool_call("lookup", city=7),
            {"environment_factory": {"counting": Counting, "picking": Picking}, "tools": [lookup]},
        ),
        (
            "qwen3_5_think",
            f"So.\n</think>\n\n<tool_call>\n<function=pick>\n{XML_VALUES}</function>\n</tool_call>",
            {"tools": [pick]},
        ),
        ("gemma", tool_call("lookup", city="Oslo") + tool_call("lookup", city=2, of=5), {"tools": [lookup]}),
    ],
    ids=["lists and odd arguments", "chatml", "kinds", "xml", "gemma"],
)
def test_policy_and_reward_functions_read_what_trls_trainer_shows_them(
    tmp_path: Path, name: str, call: str, native: dict[str, Any]
) -> None:
    """The lists that tools return, arguments typed by the schema, and calls that do not fit."""
    messages = [f"{call}<|im_end|>", ANSWER]
    if name == "gemma":
        messages = [text.replace("<|im_end|>", "<end_of_turn>") for text in messages]
    ours = [(SOGRPOTrainer, staleness) for staleness in (0, 1)]
    theirs = read_and_shown(tmp_path, name, messages, (GRPOTrainer, 0), **native)
    assert len(theirs[1][0]) > 2, "the results are not too long"
    for which in ours:
        assert read_and_shown(tmp_path, name, messages, which, **native) == theirs


def test_results_of_coroutines_and_functions_come_in_the_order_of_their_calls(tmp_path: Path) -> None:
    """TRL puts those of coroutines last."""
    calls = [
        tool_call("pick_later", number=0),
        tool_call("pick", number=1),
        tool_call("pick_later", number=9),
        tool_call("pick_later", of=9),
        tool_call("go"),
        tool_call("pick_later", number=2),
        tool_call("pick", of=9),
    ]
    messages = ["".join(calls) + "<|im_end|>", "".join(calls[:2]) + "<|im_end|>", ANSWER]
    native = {"tools": [pick, pick_later]}
    ours, ahead = (
        read_and_shown(tmp_path, "qwen2_5", messages, (SOGRPOTrainer, staleness), **native) for staleness in (0, 1)
    )
    told = [each["content"] for each in ours[1][0] if each["role"] == "tool"]
    assert [told[0], told[1], told[5], *told[7:]] == [RETURNED[0], RETURNED[1], RETURNED[2], *RETURNED[:2]]
    assert [told[i].partition(" ")[0] for i in (2, 3, 4, 6)] == ["{'error':"] * 4
    assert ["index" in told[2], "pick_later()" in told[3], "go" in told[4], "pick()" in told[6]] == [True] * 4
    assert ours == ahead, "where calls are made in order"


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


async def double(number: float) -> str:
    """
    Double a number.

    Args:
        number: It.
    """
    return f"{2 * number:g}"


class Notebook:
    def reset(self) -> None:
        self.lines: list[str] = []
        self.thread = threading.current_thread()

    async def write(self, line: str) -> str:
        """
        Write a line.

        Args:
            line: It.
        """
        await asyncio.sleep(0)
        self.lines.append(line)
        return "written"

    def read(self) -> str:
        """Read all lines."""
        assert threading.current_thread() is self.thread, "what it holds may be bound to it"
        return ", ".join(self.lines)


def broken() -> str:
    """Fail."""
    raise ConnectionError("no route")


def collected(*messages: str) -> tuple[Trajectory, ToolBox, list[str]]:
    box = ToolBox([double, broken], Sum, protocol=ChatProtocol())
    engine = Scripted(*(f"{message}<|im_end|>" for message in messages))
    collector = Collector(TOKENIZER, box, box.protocol.in_chat(TOKENIZER), LIMITS)
    box.greet([{"start": 1}])
    (trajectory,) = collector.collect([TOKENIZER.encode("Begin.")], engine, examples=[{"start": 1}])
    return trajectory, box, engine.heard


def test_a_message_calls_several_tools_in_order() -> None:
    calls = tool_call("add", number=2) + tool_call("double", number="4") + tool_call("add", number=3)
    trajectory, box, heard = collected(f"Let me see.\n{calls}", "It is print(6).")
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_DONE
    results = trajectory.observations[0].results
    assert [each[:2] for each in results] == [("add", "3"), ("double", "8"), ("add", "6")]
    assert all(f"<tool_response>\n{each.text}\n</tool_response>" in heard[1] for each in results)
    assert box.environments[0].total == 6
    assert rollout_statistics([trajectory])["tool_calls_per_trajectory"] == 3


def test_calls_of_coroutines_and_functions_are_made_in_order() -> None:
    message = tool_call("write", line="a") + tool_call("read") + tool_call("write", line="b") + tool_call("read")
    box = ToolBox([broken], Notebook, protocol=ChatProtocol())
    engine = Scripted(f"{message}<|im_end|>", f"{tool_call('write', line='c')}{tool_call('broken')}<|im_end|>")
    collector = Collector(TOKENIZER, box, box.protocol.in_chat(TOKENIZER), LIMITS)
    (trajectory,) = collector.collect([TOKENIZER.encode("Begin.")], engine)
    assert [each.text for each in trajectory.observations[0].results] == ["written", "a", "written", "a, b"]
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_UNAVAILABLE
    assert box.environments[0].lines == ["a", "b", "c"]


@pytest.mark.parametrize(
    "message",
    ["f(x) grows.", f"<think>no {tool_call('add', number=1)} yet</think>add(number=1) would do.", "<tool_call>{"],
)
def test_what_is_no_call_ends_the_trajectory(message: str) -> None:
    trajectory, box, heard = collected(message)
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_DONE
    assert (box.environments[0].total, len(heard)) == (1, 1)


@pytest.mark.parametrize(
    "said", ['{"name": "add", "arguments": ' + "[" * 5000 + "}", '"add"', "null", "5", "[1]", '{"name": 5}']
)
def test_what_is_no_call_is_text(said: str) -> None:
    """Brackets without an end no JSON parser takes, and a policy that repeats itself writes them."""
    text = f"<tool_call>\n{said}\n</tool_call>"
    protocol = ChatProtocol(functions=({},)).in_chat(TOKENIZER)
    assert protocol.parse(f"{text}<|im_end|>").calls == ()
    ids = tuple(TOKENIZER.encode(f"{text}<|im_end|>"))
    turn = Turn(ids, text, Action(ActionKind.MESSAGE, text))
    trajectory = Trajectory((1,), (turn,), StopReason.ENVIRONMENT_DONE)
    assert messages_of(trajectory, TOKENIZER, ()) == [{"role": "assistant", "content": text}]


def test_what_is_wrong_with_a_call_is_said() -> None:
    wrong = [tool_call("subtract", number=1), tool_call("add", amount=1), tool_call("double", number=[1])]
    trajectory, _, heard = collected(*wrong, "I give up.")
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_DONE
    said = [text.rpartition("<tool_response>\n")[2].partition("\n</tool_response>")[0] for text in heard[1:]]
    assert said == [
        "{'error': 'Tool subtract not found.'}",
        "{'error': \"Sum.add() got an unexpected keyword argument 'amount'\"}",
        "{'error': 'unsupported format string passed to list.__format__'}",
    ]


def test_one_script_trains_with_tools_at_once_and_ahead(tmp_path: Path) -> None:
    """What a reward function is shown, and what is logged of it, does not depend on when it was sampled."""
    roles: dict[int, set[tuple[str, ...]]] = {0: set(), 1: set()}
    for staleness in roles:

        def reward(completions: Any, environments: Any, of: int = staleness, **_: Any) -> list[float]:
            assert {type(each) for each in environments} == {Sum, Atlas}
            roles[of] |= {tuple(message["role"] for message in each) for each in completions}
            return [float(len(each[-1]["content"])) for each in completions]

        options = {"max_completion_length": 64, "max_steps": 3, "async_staleness": staleness, "reward_weights": [0.5]}
        trainer = SOGRPOTrainer(
            build_policy(vocab_size=len(TOKENIZER)),
            reward,
            SOGRPOConfig(**settings(tmp_path / str(staleness), **options)),
            Dataset.from_list([{"prompt": QUESTION, "environment": name} for name in ("sum", "atlas")] * 8),
            processing_class=TOKENIZER,
            tools=[double],
            environment_factory={"sum": Sum, "atlas": Atlas},
        )
        trainer.train()
        assert trainer.state.global_step == 3
        log = trainer.state.log_history[0]
        assert log["rewards/Sum/mean"] >= 0.0, "what `get_reward` gives is a reward of its own"
        assert trainer.reward_weights.tolist() == [0.5, 1.0]
    assert roles[0] == roles[1] == {("assistant",)}


def test_prompts_that_environments_make_are_not_sampled_ahead(tmp_path: Path) -> None:
    config = SOGRPOConfig(**settings(tmp_path, async_staleness=1))
    rows = Dataset.from_list([{"start": 1}] * 8)
    with pytest.raises(ValueError, match="no column `prompt`"):
        SOGRPOTrainer(
            build_policy(vocab_size=len(TOKENIZER)),
            lambda **_: [0.0] * 8,
            config,
            rows,
            processing_class=TOKENIZER,
            environment_factory=Sum,
        )


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("given", [TOKENIZER, [TOKENIZER], None])
def test_a_reward_may_have_its_processing_class(tmp_path: Path, staleness: int, given: Any) -> None:
    trainer = SOGRPOTrainer(
        build_policy(vocab_size=len(TOKENIZER)),
        lambda **_: [0.0] * 8,
        SOGRPOConfig(**settings(tmp_path, async_staleness=staleness)),
        Dataset.from_list([{"prompt": QUESTION}] * 8),
        processing_class=TOKENIZER,
        reward_processing_classes=[*given] if isinstance(given, list) else given,  # TRL appends to the list
        environment_factory=Sum,
    )
    first, of_environment = trainer.reward_processing_classes
    assert first is (None if given is None else TOKENIZER)
    assert of_environment is None


@pytest.mark.parametrize("given", [{"environment_factory": Sum}, {"tools": [double]}])
def test_without_a_dataset_nothing_is_sampled_ahead(tmp_path: Path, given: Any) -> None:
    config = SOGRPOConfig(**settings(tmp_path, async_staleness=1))
    with pytest.raises(ValueError, match=r"^`async_staleness` is 1, but `train_dataset` is None"):
        SOGRPOTrainer(
            build_policy(vocab_size=len(TOKENIZER)), lambda **_: [0.0], config, processing_class=TOKENIZER, **given
        )


def test_prompts_show_the_tools_of_their_environment(tmp_path: Path) -> None:
    box = ToolBox([double], {"sum": Sum, "atlas": Atlas}, protocol=ChatProtocol())
    trainer = build(tmp_path, TOKENIZER, lambda **_: [0.0] * 8, rollout_func=AgentRollout(box))
    setup = trainer.rollout_func.__wrapped__.setup(trainer)
    encoded = setup.encode([QUESTION, QUESTION], [box.shown[kind] for kind in ("sum", "atlas")])
    for ids, own, other in zip(encoded, ('"add"', '"lookup"'), ('"lookup"', '"add"'), strict=True):
        prompt = TOKENIZER.decode(ids)
        assert own in prompt
        assert '"double"' in prompt
        assert other not in prompt


@pytest.mark.parametrize(("most", "turns"), [(None, 4), (2, 3), (0, 1)])
def test_calls_are_limited_as_those_of_trls_tools(tmp_path: Path, most: int | None, turns: int) -> None:
    trainer = build(
        tmp_path,
        TOKENIZER,
        lambda **_: [0.0] * 8,
        options={"async_staleness": 1, "max_tool_calling_iterations": most},
        tools=[lookup],
    )
    sample_from(trainer, Scripted(CALL, CALL, CALL, ANSWER))
    trainer.model.eval()
    assert int(batch_of(trainer)["turn_ids"].max()) + 1 == turns
    if most is not None:
        rollout = AgentRollout(ToolBox([lookup], protocol=ChatProtocol()), limits=LIMITS)
        with pytest.raises(ValueError, match=r"Set `RolloutLimits.max_turns`"):
            rollout.check(trainer.args)


def test_a_message_that_ends_otherwise_than_the_tokenizer_says_is_told_from_what_cannot_be_written(
    tmp_path: Path,
) -> None:
    rollout = AgentRollout(ToolBox([lookup], protocol=ChatProtocol()))
    reward: Any = lambda **_: [0.0] * 8  # noqa: E731
    with pytest.raises(ValueError, match=r"set `tokenizer.eos_token = '<end_of_turn>'`"):
        build(tmp_path, gemma_tokenizer(), reward, rollout_func=rollout)
    build(tmp_path, template("gemma"), reward, rollout_func=rollout)
    in_json = gemma_tokenizer(GEMMA_TOOLS.replace("+ m.content +", "+ (m.content | tojson) +"))
    with pytest.raises(ValueError, match="as JSON or with the tool's name"):
        build(tmp_path, in_json, reward, rollout_func=rollout)


def test_results_longer_than_a_completion_do_not_refuse_a_template(tmp_path: Path) -> None:
    """What is written to compare the template with ours is not a result."""
    rollout = AgentRollout(ToolBox([lookup], protocol=ChatProtocol()))
    build(tmp_path, template("qwen2_5"), lambda **_: [], {"max_completion_length": 4}, rollout_func=rollout)


@pytest.mark.parametrize("eos", ["<eos>", "<end_of_turn>"])
@pytest.mark.parametrize("also", [None, [3, 257]])
def test_messages_that_no_end_of_sequence_token_ends_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, eos: str, also: list[int] | None
) -> None:
    tokenizer = gemma_tokenizer(files("trl").joinpath("chat_templates/gemma3.jinja").read_text())
    tokenizer.eos_token = eos
    policy = build_policy(vocab_size=len(tokenizer))
    end = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    policy.generation_config.eos_token_id = also and [*also, end]
    build(tmp_path, tokenizer, lambda **_: [], policy=policy)
    told = f"Set `tokenizer.eos_token = '<end_of_turn>'`, or add {end} to `model.generation_config.eos_token_id`"
    assert (told in caplog.text) == (eos == "<eos>" and also is None)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("which", ["tools", "environment", "rollout"])
def test_text_is_no_prompt_for_tools_that_the_template_shows(tmp_path: Path, staleness: int, which: str) -> None:
    """TRL would fail at its first completion, in words that name nothing."""
    box = ToolBox([lookup], protocol=ChatProtocol())
    given: dict[str, Any] = {
        "tools": {"tools": [lookup]},
        "environment": {"environment_factory": Atlas},
        "rollout": {"rollout_func": AgentRollout(box)},
    }[which]
    config = SOGRPOConfig(**settings(tmp_path, async_staleness=staleness))
    with pytest.raises(ValueError, match=r"`train_dataset` has the prompt 'Where is Oslo\?', but"):
        SOGRPOTrainer(
            build_policy(vocab_size=len(TOKENIZER)),
            lambda **_: [0.0] * 8,
            config,
            Dataset.from_list([{"prompt": "Where is Oslo?"}] * 8),
            processing_class=TOKENIZER,
            **given,
        )


def test_refuses_a_template_without_tools_and_a_tag_for_searches(tmp_path: Path) -> None:
    plain: Any = qwen_tokenizer()
    plain.chat_template = "{% for m in messages %}<|im_start|>{{ m['role'] + m['content'] }}<|im_end|>{% endfor %}"
    rollout = AgentRollout(ToolBox([lookup], protocol=ChatProtocol()))
    with pytest.raises(ValueError, match="the chat template shows no tool calls") as error:
        build(tmp_path, plain, lambda **_: [0.0] * 8, rollout_func=rollout)
    assert "AgentRollout" not in str(error.value), "which was given"
    unknown = gemma_tokenizer()
    unknown.response_template = None
    with pytest.raises(ValueError, match=r"`tokenizer.response_template` is None, and TRL knows none"):
        build(tmp_path, unknown, lambda **_: [0.0] * 8, rollout_func=rollout)
    with pytest.raises(ValueError, match="writes results of tools as a `ToolBox` cannot"):
        build(tmp_path, template("llama3_1"), lambda **_: [0.0] * 8, rollout_func=rollout)
    with pytest.raises(ValueError, match="give it to the `ToolBox`"):
        AgentRollout(ToolBox([lookup], protocol=ChatProtocol()), ChatProtocol())
    with pytest.raises(ValueError, match="no `response_template`"):
        Collector(plain, ToolBox([lookup]), ChatProtocol(functions=({},)).in_chat(plain))
    with pytest.raises(DocstringParsingException):
        ToolBox([lambda number: number], protocol=ChatProtocol())
    with pytest.raises(ValueError, match=r"add `search_tool\(engine\)` to the tools"):
        ToolBox(search=NoSearch(), protocol=ChatProtocol())
    assert [tool.__name__ for tool in ToolBox([search_tool(NoSearch())], protocol=ChatProtocol()).shown[None]] == [
        "search"
    ]
