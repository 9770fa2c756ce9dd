"""The engines around TRL's own `VLLMGeneration`: colocated, and a server that answers, breaks off, hangs or refuses.

Only vLLM is scripted; tests/vllm runs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from trl.generation import vllm_generation

from sorl_trl.rollout import TurnEnd, TurnRequest, generate_turns
from sorl_trl.rollout.engines import server as vllm_server
from sorl_trl.rollout.engines.server import VLLMServer
from sorl_trl.rollout.engines.vllm import EngineUnavailable, VLLMColocateEngine, VLLMServerEngine, vllm_engine
from sorl_trl.trainers.vllm_policy import WeightClient, used_by_trl
from tests.model_families import MIXTURES
from tests.policies import play_turns, take_turns
from tests.scripted_vllm import (
    LOGPROB,
    WINDOW,
    Script,
    ScriptedLLM,
    ScriptedServer,
    break_off,
    fail_with,
    hang,
    pretend_vllm,
    scripted_server,
    scripted_wrapper,
)
from tests.unit.rollout.fakes import encode, word_tokenizer

EOS = 1
(CLOSING,) = encode(word_tokenizer(), "</search>")
PARIS, FRANCE, DOC = encode(word_tokenizer(), "Paris France Doc")
END = TurnEnd(word_tokenizer(), ["</search>"], [EOS])


@pytest.fixture(autouse=True)
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_vllm(monkeypatch)
    monkeypatch.setattr(vllm_server, "_WAIT_S", 0.0)


@pytest.fixture
def script() -> Script:
    return Script(lambda context: [PARIS, CLOSING])


@pytest.fixture
def served(script: Script) -> Iterator[ScriptedServer]:
    with scripted_server(script) as running:
        yield running


@pytest.fixture
def wrap(script: Script) -> Callable[..., Any]:
    """Makes TRL's wrapper around a colocated engine."""
    return lambda **settings: scripted_wrapper("colocate", llm=ScriptedLLM(script), **settings)


@pytest.fixture(params=["colocate", "server"])
def wrap_either(request: pytest.FixtureRequest, wrap: Callable[..., Any]) -> Callable[..., Any]:
    """Makes TRL's wrapper around a colocated engine, or a server."""
    if request.param == "colocate":
        return wrap
    url = request.getfixturevalue("served").url
    return lambda **settings: scripted_wrapper("server", server_base_url=url, **settings)


def ids(generations: Any) -> list[tuple[int, ...]]:
    return [generation.token_ids for generation in generations]


def test_each_row_has_its_limit_and_its_end(script: Script, wrap_either: Callable[..., Any]) -> None:
    """Closed early, closed by its last allowed token, cut, ended by the end-of-sequence token, filling the window."""
    contexts = [(DOC,), (DOC, DOC), (PARIS,), (FRANCE,), (DOC,) * (WINDOW - 1)]
    turns = [[PARIS, CLOSING], [PARIS, FRANCE, CLOSING], [PARIS] * 8, [PARIS, PARIS, EOS], [PARIS, PARIS]]
    script.turns = dict(zip(contexts, turns, strict=True)).__getitem__
    engine = vllm_engine(wrap_either(), END)
    assert engine.window == WINDOW
    generations = take_turns(engine, contexts, [4, 3, 2, 3, 99])
    assert ids(generations) == [(*turns[0],), (*turns[1],), (PARIS, PARIS), (*turns[3],), (PARIS,)]
    assert [g.stopped for g in generations] == [True, True, False, True, False]
    assert all(g.logprobs == (LOGPROB,) * len(g.token_ids) for g in generations)


def test_how_a_turn_is_sampled(script: Script, wrap_either: Callable[..., Any]) -> None:
    kwargs = {"presence_penalty": 0.2}
    wrapper = wrap_either(generation_kwargs=kwargs, structured_outputs_regex="a+", min_p=None, temperature=0.7)
    take_turns(vllm_engine(wrapper, END), [(DOC,)], [4])
    ((_, asked),) = script.requests
    expected = {
        **{"max_tokens": 4, "n": 1, "logprobs": 0, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
        **{"repetition_penalty": 1.0, "presence_penalty": 0.2, "stop": ["</search>"]},
        **{"include_stop_str_in_output": True, "skip_special_tokens": False, "stop_token_ids": [EOS]},
        **{"ignore_eos": True},
    }
    if wrapper.mode == "server":
        own = {"model": "policy", "prompt": [[DOC]], "return_token_ids": True, "return_tokens_as_token_ids": True}
        own |= {"structured_outputs": {"regex": "a+"}}
    else:
        own = {"output_kind": "final only", "structured_outputs": SimpleNamespace(regex="a+")}
    assert 0 <= asked.pop("seed") < 2**63
    assert asked == expected | own
    assert wrapper.generation_kwargs is kwargs


def test_a_turn_has_stops_and_a_schema_of_its_own(script: Script, wrap_either: Callable[..., Any]) -> None:
    """The third turn follows the trainer's settings, as if the others had asked for nothing."""
    script.turns = lambda context: [PARIS, FRANCE]
    wrapper = wrap_either(structured_outputs_regex="a+")
    engine = vllm_engine(wrapper, END)
    assert engine.constrains
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    requests = [TurnRequest(0, [DOC], 4, ["Paris France", "Doc"]), TurnRequest(1, [DOC] * 2, 4, ["Doc"], schema)]
    turns = play_turns(engine, [*requests, TurnRequest(2, [DOC] * 3, 4)])
    assert [turn.stopped for turn in turns] == [True, False, False]
    asked = [settings for _, settings in sorted(script.requests, key=lambda request: len(request[0]))]
    closed = "</search>"
    assert [each["stop"] for each in asked] == [[closed, "Paris France", "Doc"], [closed, "Doc"], [closed]]
    kind = dict if wrapper.mode == "server" else SimpleNamespace
    assert [each["structured_outputs"] for each in asked] == [kind(regex="a+"), kind(json=schema), kind(regex="a+")]


def in_three_layers(tokens: list[int]) -> Any:
    """The first layer has no router. Others send a token to the expert of its number, and to another one."""
    return np.array([[[0, 0], [token, token + 1], [token + 2, token]] for token in tokens], dtype=np.uint8)


@pytest.fixture
def wrap_mixture(script: Script, wrap_either: Callable[..., Any]) -> Any:
    """TRL's wrapper for a mixture of three layers."""
    return wrap_either(model=MIXTURES["qwen3_moe"]())


def test_turns_report_the_experts_of_all_that_is_read(script: Script, wrap_mixture: Any) -> None:
    engine = vllm_engine(wrap_mixture, END)
    (silent,) = take_turns(engine, [[DOC]], [4])
    assert silent.routes is None
    engine.report_routes()
    script.routes = in_three_layers
    script.turns = lambda context: [len(context), FRANCE, CLOSING]
    engine.open(2)
    for contexts, read in (
        ([[DOC], [PARIS, DOC]], [[DOC, 1, FRANCE], [PARIS, DOC, 2, FRANCE]]),
        ([[DOC, 1, FRANCE], [DOC]], [[DOC, 1, FRANCE, 3, FRANCE], [DOC, 1, FRANCE]]),
    ):
        for turn, tokens in zip(generate_turns(engine, contexts, [3, 3]), read, strict=True):
            assert turn.routes is not None and turn.routes.dtype == np.uint8
            assert turn.routes.tolist() == in_three_layers(tokens)[:, 1:].tolist()
    engine.close()


def test_what_reports_no_routes_or_has_not_recorded_any_is_refused(script: Script, wrap_mixture: Any) -> None:
    engine = vllm_engine(wrap_mixture, END)
    engine.report_routes()
    with pytest.raises(RuntimeError, match="--enable-return-routed-experts"):
        take_turns(engine, [[DOC]], [4])
    script.routes = lambda tokens: np.zeros((len(tokens), 3, 2), dtype=np.uint8)
    with pytest.raises(RuntimeError, match="another mixture-of-experts kernel"):
        take_turns(engine, [[DOC]], [4])


class TestColocated:
    def test_rows_do_not_wait_for_each_other(self, script: Script, wrap: Callable[..., Any]) -> None:
        script.turns = lambda context: [PARIS] * len(context) + [CLOSING]
        engine = VLLMColocateEngine(wrap(), END)
        engine.open(3)
        for row, size in ((0, 1), (2, 1), (1, 3)):
            engine.submit(TurnRequest(row, [DOC] * size, 9))
        assert engine.poll() == [] and not engine.idle
        assert [row for row, _ in engine.poll()] == [0, 2]
        engine.submit(TurnRequest(0, [DOC], 9))
        assert [row for _ in range(3) for row, _ in engine.poll()] == [0, 1]
        assert engine.idle and engine.poll() == []
        engine.close()

    def test_what_is_unfinished_is_aborted_and_nothing_cached_is_trusted(self, wrap: Callable[..., Any]) -> None:
        wrapper = wrap()
        engine = VLLMColocateEngine(wrapper, END)
        wrapper.llm.llm_engine.step = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            take_turns(engine, [(DOC,)] * 2, [4, 4])
        one, other, *after = wrapper.llm.log
        assert after == [each.replace("add ", "abort ") for each in (one, other)] + ["forget"] and one != other
        wrapper.llm.llm_engine.step = wrapper.llm.step
        assert ids(take_turns(engine, [(DOC,)], [4])) == [(PARIS, CLOSING)]

    def test_a_released_row_generates_no_more(self, wrap: Callable[..., Any]) -> None:
        wrapper = wrap()
        engine = VLLMColocateEngine(wrapper, END)
        engine.open(3)
        engine.submit(TurnRequest(0, [DOC], 9))
        engine.poll()
        engine.submit(TurnRequest(1, [DOC], 9))
        for row in (0, 1, 2):  # generating, submitted, never begun
            engine.release(row)
        assert engine.idle and engine.poll() == []
        assert len(wrapper.llm.log) == 3, "the second row's turn was not even begun"


class TestServer:
    @staticmethod
    def engine(served: ScriptedServer, answer_s: float = 30.0) -> VLLMServerEngine:
        return VLLMServerEngine(scripted_wrapper("server"), END, VLLMServer(served.url, answer_s))

    def test_poll_waits_for_a_turn_or_to_be_woken(self, served: ScriptedServer) -> None:
        served.behaviours = [hang]
        engine = self.engine(served)
        engine.open(2)
        engine.submit(TurnRequest(0, [DOC], 4))
        while served.behaviours:  # row 0 is the one that hangs
            threading.Event().wait(0.001)
        engine.wake()
        assert engine.poll() == []
        threading.Timer(0.05, engine.wake).start()
        assert engine.poll() == []
        engine.submit(TurnRequest(1, [DOC], 4))
        assert [row for row, _ in engine.poll()] == [1] and not engine.idle
        engine.close()
        assert engine.idle

    def test_nobody_waits_for_a_released_row(self, served: ScriptedServer) -> None:
        """The refusal of its turn comes while its next turn is generated."""
        released = threading.Event()

        def refuse_late(handler: Any) -> None:
            assert released.wait(60.0)
            fail_with(400, "too late")(handler)

        served.behaviours = [refuse_late]
        engine = self.engine(served)
        engine.open(1)
        engine.submit(TurnRequest(0, [DOC], 4))
        while served.behaviours:
            threading.Event().wait(0.001)
        engine.release(0)
        assert engine.idle and engine.poll() == []
        taken = engine._answers
        released.set()
        while taken.empty():
            threading.Event().wait(0.001)
        engine.submit(TurnRequest(0, [DOC], 4))
        ended: list[Any] = []
        while not engine.idle:
            ended += engine.poll()
        assert [(row, generation.token_ids) for row, generation in ended] == [(0, (PARIS, CLOSING))]
        engine.close()

    @pytest.mark.parametrize("passing", [break_off, fail_with(500, "no"), fail_with(503, "later")])
    def test_what_passes_is_sent_again_with_its_seed_and_counts_once(
        self, served: ScriptedServer, passing: Any
    ) -> None:
        served.behaviours = [passing] * 3
        assert ids(take_turns(self.engine(served), [(DOC,)], [4])) == [(PARIS, CLOSING)]
        assert len(served.bodies) == 4 and all(body == served.bodies[0] for body in served.bodies)

    @pytest.mark.parametrize(
        ("behaviours", "error", "message"),
        [
            ([break_off] * 4, EngineUnavailable, "cannot be reached"),
            ([fail_with(500, "engine dead")] * 4, EngineUnavailable, "HTTP 500: .*engine dead"),
            ([hang], EngineUnavailable, "did not answer"),
            ([fail_with(400, "context length is 12")], RuntimeError, "HTTP 400: .*context length is 12"),
            ([lambda handler: handler.answer({"choices": [{"index": 0}]})], RuntimeError, "token_ids"),
        ],
        ids=["broken", "500", "hung", "refused", "another answer"],
    )
    def test_what_does_not_pass_is_a_named_error(
        self, served: ScriptedServer, behaviours: list[Any], error: type[Exception], message: str
    ) -> None:
        """An answer that does not come is not asked for again: the server may still be sampling it."""
        served.behaviours = [*behaviours]
        with pytest.raises(error, match=message) as caught:
            take_turns(self.engine(served, 0.5 if behaviours == [hang] else 30.0), [(DOC,)], [4])
        assert isinstance(caught.value, EngineUnavailable) == (error is EngineUnavailable)
        assert len(served.bodies) == len(behaviours)


class TestWeights:
    @pytest.mark.parametrize("routes", [False, True])
    def test_vllm_in_the_trainers_process_is_asked_for_routes(
        self, monkeypatch: pytest.MonkeyPatch, routes: bool
    ) -> None:
        started: list[dict[str, Any]] = []
        monkeypatch.setattr(vllm_generation, "LLM", lambda **given: started.append(given), raising=False)
        with used_by_trl(routes):
            vllm_generation.LLM(model="m")
        vllm_generation.LLM(model="m")
        asked = {"enable_return_routed_experts": True} if routes else {}
        assert started == [{"model": "m", **asked}, {"model": "m"}]

    def test_a_failed_update_takes_part_in_the_gathers_of_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Under ZeRO-3 the other processes go on until the last parameter, and would wait for one that left."""
        client: Any = object.__new__(WeightClient)
        client.base_url, client.version = "http://127.0.0.1:1", 1
        monkeypatch.setattr(client, "_get", lambda _: {"weight_version": "2"})
        gathered: list[str] = []
        parameters = ((name, gathered.append(name)) for name in "abc")
        with pytest.raises(EngineUnavailable, match="was restarted"):
            client.update_named_params([], parameters)
        assert gathered == ["a", "b", "c"]
