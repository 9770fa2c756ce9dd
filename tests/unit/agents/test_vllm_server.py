"""VLLMServerEngine against an HTTP server that answers, breaks off, hangs or refuses; tests/vllm runs vLLM's own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from sorl_trl.agents.vllm import EngineUnavailable, VLLMServerEngine, connection, vllm_engine
from sorl_trl.agents.vllm.client import WeightClient
from sorl_trl.agents.vllm.connection import VLLMServer
from sorl_trl.rollout import TurnEnd
from sorl_trl.trainers import policy_generation
from sorl_trl.trainers.ahead.policies import ServerPolicy
from sorl_trl.trainers.policy_generation import PolicyGeneration
from tests.engines import take_turns
from tests.scripted_vllm import (
    LOGPROB,
    WINDOW,
    Script,
    ScriptedServer,
    break_off,
    fail_with,
    hang,
    scripted_server,
    scripted_wrapper,
)
from tests.unit.rollout.fakes import encode, word_tokenizer

EOS = 1
(CLOSING,) = encode(word_tokenizer(), "</search>")
PARIS, FRANCE, DOC = encode(word_tokenizer(), "Paris France Doc")
END = TurnEnd(word_tokenizer(), ["</search>"], [EOS])


@pytest.fixture
def served() -> Iterator[ScriptedServer]:
    with scripted_server(Script(lambda context: [PARIS, CLOSING])) as running:
        yield running


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_WAIT_S", 0.0)


def wrap(served: ScriptedServer, **settings: Any) -> Any:
    return scripted_wrapper("server", server_base_url=served.url, **settings)


def engine_of(served: ScriptedServer, answer_s: float = 30.0) -> VLLMServerEngine:
    return VLLMServerEngine(wrap(served), END, VLLMServer(served.url, answer_s))


def ids(generations: Any) -> list[tuple[int, ...]]:
    return [generation.token_ids for generation in generations]


def test_each_row_is_a_request_with_its_own_limit(served: ScriptedServer) -> None:
    contexts = [(DOC,), (DOC, DOC), (PARIS,), (FRANCE,), (DOC,) * 10]
    turns = [[PARIS, CLOSING], [PARIS, FRANCE, CLOSING], [PARIS] * 8, [PARIS, PARIS, EOS], [PARIS, PARIS]]
    served.script.turns = dict(zip(contexts, turns, strict=True)).__getitem__
    engine = vllm_engine(wrap(served), END)
    generations = take_turns(engine, contexts, [4, 3, 2, 3, 99])
    turns[2] = turns[2][:2]
    assert ids(generations) == [tuple(turn) for turn in turns]
    assert [g.stopped for g in generations] == [True, True, False, True, False]
    assert all(g.logprobs == (LOGPROB,) * len(g.token_ids) for g in generations)
    assert sorted((len(context), body["max_tokens"]) for context, body in served.script.asked) == [
        *((1, 2), (1, 3), (1, 4), (2, 3), (10, 2))
    ]
    assert (engine.work.prefilled_tokens, engine.work.row_steps) == (15, 7)


def test_what_is_sent(served: ScriptedServer) -> None:
    wrapper = wrap(served, generation_kwargs={"presence_penalty": 0.2}, structured_outputs_regex="a+", temperature=0.7)
    engine = vllm_engine(wrapper, END)
    torch.manual_seed(0)
    take_turns(engine, [(DOC,)], [4])
    ((_, body),) = served.script.asked
    seed = body.pop("seed")
    assert 0 <= seed < 2**63
    assert body == {
        **{"model": "policy", "prompt": [DOC], "max_tokens": 4, "n": 1, "logprobs": 0, "temperature": 0.7},
        **{"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.2},
        **{"stop": ["</search>"], "include_stop_str_in_output": True, "skip_special_tokens": False},
        **{"stop_token_ids": [EOS], "ignore_eos": True, "structured_outputs": {"regex": "a+"}},
        **{"return_token_ids": True, "return_tokens_as_token_ids": True},
    }


def test_poll_waits_for_a_turn_or_to_be_woken(served: ScriptedServer) -> None:
    served.behaviours = [hang]
    engine = engine_of(served)
    engine.open(2)
    engine.submit(0, [DOC], 4)
    while served.behaviours:  # row 0 is the one that hangs
        threading.Event().wait(0.001)
    engine.wake()
    assert engine.poll() == []
    waker = threading.Timer(0.05, engine.wake)
    waker.start()
    assert engine.poll() == []
    engine.submit(1, [DOC], 4)
    assert [row for row, _ in engine.poll()] == [1] and not engine.idle
    engine.close()
    assert engine.idle


@pytest.mark.parametrize("passing", [break_off, fail_with(500, "no"), fail_with(503, "later")])
def test_what_passes_is_sent_again_with_its_seed_and_counts_once(served: ScriptedServer, passing: Any) -> None:
    served.behaviours = [passing] * 3
    engine = engine_of(served)
    assert ids(take_turns(engine, [(DOC,)], [4])) == [(PARIS, CLOSING)]
    assert len(served.headers) == 4 and len(served.script.asked) == 1
    assert engine.work.row_steps == 1


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [(break_off, "cannot be reached"), (fail_with(500, "engine dead"), "HTTP 500: .*engine dead")],
)
def test_what_does_not_pass_is_a_named_error(served: ScriptedServer, behaviour: Any, said: str) -> None:
    served.behaviours = [behaviour] * 4
    with pytest.raises(EngineUnavailable, match=said):
        take_turns(engine_of(served), [(DOC,)], [4])
    assert not served.behaviours


def test_a_server_that_is_gone_is_a_named_error(served: ScriptedServer) -> None:
    engine = engine_of(served)
    served.shutdown()
    served.server_close()
    served.behaviours = [break_off] * 12  # the connection that `engine` has is still served
    with pytest.raises(EngineUnavailable, match="cannot be reached"):
        take_turns(engine, [(DOC,)] * 3, [4] * 3)
    with pytest.raises(EngineUnavailable, match="v1/models cannot be reached"):
        engine_of(served)


def test_a_server_that_hangs_is_a_named_error_and_not_asked_again(served: ScriptedServer) -> None:
    served.behaviours = [hang]
    with pytest.raises(EngineUnavailable, match=r"did not answer within 0\.1 s"):
        take_turns(engine_of(served, 0.1), [(DOC,)], [4])
    assert len(served.headers) == 1


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_refusal_is_told_and_not_sent_again(served: ScriptedServer, status: int) -> None:
    served.behaviours = [fail_with(status, "maximum context length is 12")]
    with pytest.raises(RuntimeError, match=f"HTTP {status}: .*maximum context length is 12") as caught:
        take_turns(engine_of(served), [(DOC,)], [4])
    assert not isinstance(caught.value, EngineUnavailable) and len(served.headers) == 1


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"token_ids": [PARIS]}, "is not one of vLLM's"),
        (
            {"index": 0, "token_ids": [PARIS], "logprobs": {"token_logprobs": [-1]}, "finish_reason": "abort"},
            "'abort'",
        ),
    ],
)
def test_an_answer_that_is_none(served: ScriptedServer, choice: dict[str, Any], said: str) -> None:
    served.behaviours = [lambda handler: handler.answer({"choices": [{"index": 0, **choice}]})]
    with pytest.raises(RuntimeError, match=said):
        take_turns(engine_of(served), [(DOC,)], [4])


def test_a_probe_is_one_request_for_a_token_after_each_beginning(served: ScriptedServer) -> None:
    served.script.turns = lambda context: [context[-1], CLOSING]
    trainer = SimpleNamespace(vllm_generation=wrap(served), temperature=0.7)
    probe = ServerPolicy(trainer).probe([DOC, PARIS, FRANCE], seed=5)
    assert (probe.context, probe.lengths) == ([DOC, PARIS, FRANCE], [1, 2, 3])
    assert (probe.token_ids, probe.logprobs) == ([DOC, PARIS, FRANCE], [LOGPROB] * 3)
    long = ServerPolicy(trainer).probe([DOC] * 99, seed=5)
    assert len(long.context) == long.lengths[-1] == WINDOW - 1 and len(served.headers) == 2
    assert all(body["temperature"] == 0.7 and body["top_p"] == 1.0 for _, body in served.script.asked)


def test_closing_waits_for_nothing(served: ScriptedServer) -> None:
    """What hangs is left, what has not been sent never is, and the next rollout hears of neither."""
    released = threading.Event()

    def held(handler: Any) -> None:
        released.wait(30.0)
        fail_with(400, "late")(handler)

    served.behaviours = [held] * 64
    engine = engine_of(served)
    engine.open(80)
    for row in range(80):
        engine.submit(row, [DOC], 4)
    while served.behaviours:
        threading.Event().wait(0.001)
    engine.close()
    assert ids(take_turns(engine_of(served), [(DOC,)], [4])) == [(PARIS, CLOSING)]
    released.set()
    engine._server.threads.submit(int).result(30.0)  # what was submitted before has been looked at
    assert len(served.headers) == 65


def test_a_failed_update_takes_part_in_the_gathers_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ZeRO-3 the other processes go on until the last parameter: who left before would leave them waiting."""
    client: Any = object.__new__(WeightClient)
    client.base_url, client.version = "http://127.0.0.1:1", 1
    monkeypatch.setattr(client, "_get", lambda _: {"weight_version": "2"})
    gathered: list[str] = []
    parameters = ((name, gathered.append(name)) for name in "abc")
    with pytest.raises(EngineUnavailable, match="was restarted"):
        client.update_named_params([], parameters)
    assert gathered == ["a", "b", "c"]


def test_a_trainer_of_this_package_sends_weights_through_our_client(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        def __init__(self, base_url: str, group_port: int, connection_timeout: float) -> None:
            self.given = (base_url, group_port, connection_timeout)

        def init_communicator(self, device: torch.device) -> None:
            self.device = device

    monkeypatch.setattr(policy_generation, "WeightClient", Client)
    options = {"mode": "server", "server_port": 8001, "group_port": 7, "server_timeout": 5.0}
    generation = PolicyGeneration(torch.nn.Linear(1, 1), Accelerator(cpu=True), word_tokenizer(), **options)
    assert generation.vllm_client.given == ("http://0.0.0.0:8001", 7, 5.0)
    assert generation.vllm_client.device == torch.device("cpu")
