"""VLLMGenerator around TRL's own `VLLMGeneration`. Only what vLLM itself would do is scripted; tests/vllm runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from sorl_trl.rollout import TurnEnd
from sorl_trl.trainers.agents import vllm
from sorl_trl.trainers.agents.vllm import VLLMGenerator, awake
from tests.unit.rollout.fakes import encode, word_tokenizer

WINDOW = 12
EOS = 1
(CLOSING,) = encode(word_tokenizer(), "</search>")
PARIS, FRANCE, DOC = encode(word_tokenizer(), "Paris France Doc")
END = TurnEnd(word_tokenizer(), ["</search>"], [EOS])


@dataclass
class Script:
    """What the policy says after each prompt, cut where vLLM cuts: at the limit, at the window."""

    turns: dict[tuple[int, ...], list[int]]

    def __post_init__(self) -> None:
        self.asked: list[tuple[list[list[int]], dict[str, Any]]] = []

    def say(self, prompts: Sequence[list[int]], parameters: dict[str, Any]) -> list[list[int]]:
        self.asked.append(([list(prompt) for prompt in prompts], dict(parameters)))
        limit = parameters["max_tokens"]
        return [self.turns[tuple(prompt)][: min(limit, WINDOW - len(prompt))] for prompt in prompts]


class Engine:
    """In the place of `vllm.LLM`: TRL's wrapper and our generator around it are the real ones."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.log: list[str] = []
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=lambda _: self.log.append("load")))
        self.llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=WINDOW),
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner)),
        )

    def generate(self, prompts: Any, sampling_params: Any, use_tqdm: bool) -> list[Any]:
        self.log.append("generate")
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        said = self.script.say(ids, vars(sampling_params))
        return [
            SimpleNamespace(
                prompt_token_ids=prompt,
                outputs=[
                    SimpleNamespace(
                        token_ids=turn, logprobs=[{t: SimpleNamespace(logprob=-0.5, rank=1)} for t in turn]
                    )
                ],
            )
            for prompt, turn in zip(ids, said, strict=True)
        ]

    def sleep(self, level: int) -> None:
        self.log.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.log.append(f"wake {tags[0]}")

    def reset_prefix_cache(self) -> None:
        self.log.append("forget")


class Server:
    """In the place of TRL's client. Refuses what vLLM's server refuses."""

    base_url = "http://127.0.0.1:8000"

    def __init__(self, script: Script) -> None:
        self.script = script

    def _get(self, url: str) -> Any:
        assert url == f"{self.base_url}/v1/models"
        return {"data": [{"id": "policy", "max_model_len": WINDOW}]}

    def generate(
        self, prompts: Any, features: Any, max_tokens: int, generation_kwargs: Any, **other: Any
    ) -> dict[str, Any]:
        parameters = {"max_tokens": max_tokens, **generation_kwargs}
        if max(map(len, prompts)) + parameters["max_tokens"] > WINDOW:
            raise Exception("Request failed: 400, maximum context length")
        said = self.script.say(prompts, parameters)
        return {"prompt_ids": prompts, "completion_ids": said, "logprobs": [[[-0.5] for _ in ids] for ids in said]}


@pytest.fixture
def wrap(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """TRL's wrapper as its constructor leaves it, with the engine or the client given."""
    monkeypatch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)

    def build(script: Script, mode: str = "colocate", sleeps: bool = False) -> Any:
        wrapper: Any = object.__new__(VLLMGeneration)
        settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        vars(wrapper).update(settings, mode=mode, max_completion_length=99, generation_kwargs={"seed": 3}, logprobs=0)
        vars(wrapper).update(structured_outputs_regex=None, tensor_parallel_size=1, enable_sleep_mode=sleeps)
        wrapper.accelerator = Accelerator(cpu=True)
        wrapper.model = torch.nn.Linear(1, 1)  # two parameters to send
        wrapper._dist = SimpleNamespace(is_fsdp=False, gather_params=lambda _: nullcontext())
        wrapper._llm_weights_sleeping = sleeps
        if mode == "colocate":
            wrapper.llm = Engine(script)
        else:
            wrapper.vllm_client = Server(script)
        return wrapper

    return build


MODES = pytest.mark.parametrize("mode", ["colocate", "server"])


@MODES
def test_each_row_has_its_limit_and_its_end(wrap: Any, mode: str) -> None:
    """Closed early, closed by its last allowed token, cut, ended by the end-of-sequence token, filling the window."""
    contexts = [(DOC,), (DOC, DOC), (PARIS,), (FRANCE,), (DOC,) * 10]
    turns = [[PARIS, CLOSING], [PARIS, FRANCE, CLOSING], [PARIS] * 8, [PARIS, PARIS, EOS], [PARIS, PARIS]]
    wrapper = wrap(Script(dict(zip(contexts, turns, strict=True))), mode)
    generations = VLLMGenerator(wrapper, END).generate(contexts, [4, 3, 2, 3, 2])
    turns[2] = turns[2][:2]
    assert [g.token_ids for g in generations] == [tuple(turn) for turn in turns]
    assert [g.stopped for g in generations] == [True, True, False, True, False]
    assert all(g.logprobs == (-0.5,) * len(g.token_ids) for g in generations)


@MODES
def test_the_settings_of_a_turn_are_its_own(wrap: Any, mode: str) -> None:
    script = Script({(DOC,): [CLOSING]})
    wrapper = wrap(script, mode)
    wrapper.generation_kwargs = given = {"seed": 3, "max_tokens": 500}
    client = getattr(wrapper, "vllm_client", None)
    VLLMGenerator(wrapper, END).generate([(DOC,)], [4])
    ((_, asked),) = script.asked
    ends = {"stop": ["</search>"], "include_stop_str_in_output": True, "stop_token_ids": [EOS], "ignore_eos": True}
    for name, value in {**ends, "skip_special_tokens": False, "max_tokens": 4, "seed": 3}.items():
        assert asked[name] == value, name
    assert wrapper.generation_kwargs is given and getattr(wrapper, "vllm_client", None) is client
    script.turns.clear()
    with pytest.raises(KeyError):
        VLLMGenerator(wrapper, END).generate([(DOC,)], [4])
    assert wrapper.generation_kwargs is given and getattr(wrapper, "vllm_client", None) is client


def test_the_server_is_sent_one_request_per_limit(wrap: Any) -> None:
    """With one limit for all it would refuse the second row, and with it the others."""
    contexts = [(DOC,), (FRANCE,) * 11, (PARIS,)]
    script = Script({context: [context[0], CLOSING] for context in contexts})
    generations = VLLMGenerator(wrap(script, "server"), END).generate(contexts, [6, 1, 6])
    asked = sorted((parameters["max_tokens"], prompts) for prompts, parameters in script.asked)
    assert asked == [(1, [[FRANCE] * 11]), (6, [[DOC], [PARIS]])]
    assert [g.token_ids for g in generations] == [(DOC, CLOSING), (FRANCE,), (PARIS, CLOSING)]


@MODES
def test_the_window_is_the_engines(wrap: Any, mode: str) -> None:
    assert VLLMGenerator(wrap(Script({}), mode), END).window == WINDOW


def test_ranks_bring_equally_many_rows(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank has three rows and a longer limit: ours are filled up with copies, whose results are dropped."""
    others = iter([[3], [8, 8, 8]])
    monkeypatch.setattr(vllm, "gather_object", lambda own: [*own, *next(others)])
    script = Script({(DOC, DOC): [PARIS] * 9})
    generations = VLLMGenerator(wrap(script), END).generate([(DOC, DOC)], [4])
    assert [g.token_ids for g in generations] == [(PARIS,) * 4]
    ((prompts, asked),) = script.asked
    assert (prompts, asked["max_tokens"]) == ([[DOC, DOC]] * 3, 8)


class TestAwake:
    """TRL's `generate` wakes, syncs and puts to sleep by itself, at every call."""

    @pytest.fixture
    def wrapper(self, wrap: Any) -> Iterator[Any]:
        yield wrap(Script({(DOC,): [CLOSING]}), sleeps=True)

    @staticmethod
    def turns(wrapper: Any, count: int = 3) -> None:
        generator = VLLMGenerator(wrapper, END)
        for _ in range(count):
            generator.generate([(DOC,)], [4])

    ONCE = ("wake weights", "load", "load", "forget", "wake kv_cache")

    def test_trl_pays_at_every_call(self, wrapper: Any) -> None:
        self.turns(wrapper)
        assert wrapper.llm.log == [*self.ONCE, "generate", "sleep 2"] * 3

    def test_a_rollout_pays_once(self, wrapper: Any) -> None:
        with awake(wrapper):
            self.turns(wrapper)
        assert wrapper.llm.log == [*self.ONCE, *["generate"] * 3, "sleep 2"]
        assert (wrapper.enable_sleep_mode, wrapper._llm_weights_sleeping) == (True, True)

    def test_weights_that_were_sent_before_the_rollout_are_not_sent_again(self, wrapper: Any) -> None:
        wrapper.sync_weights()  # as TRL does where a step was made since
        wrapper.llm.log.clear()
        with awake(wrapper):
            self.turns(wrapper)
        assert wrapper.llm.log == ["wake kv_cache", *["generate"] * 3, "sleep 2"]

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_it_sleeps_after_a_failure_too(self, wrapper: Any, error: type[BaseException]) -> None:
        with pytest.raises(error), awake(wrapper):
            raise error
        assert wrapper.llm.log[-1] == "sleep 2"
        assert (wrapper.enable_sleep_mode, wrapper._llm_weights_sleeping) == (True, True)

    def test_without_sleep_mode_nothing_is_done(self, wrap: Any) -> None:
        wrapper = wrap(Script({(DOC,): [CLOSING]}))
        with awake(wrapper):
            self.turns(wrapper)
        assert wrapper.llm.log == ["generate"] * 3
        with awake(wrap(Script({}), "server", sleeps=True)):
            pass
