"""VLLMColocateEngine around TRL's own `VLLMGeneration`. Only vLLM is scripted; tests/vllm runs it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from sorl_trl.agents.vllm import VLLMColocateEngine, vllm_engine
from sorl_trl.rollout import EngineWork, TurnEnd, generate_turns
from tests.engines import take_turns
from tests.scripted_vllm import LOGPROB, WINDOW, Script, ScriptedLLM, pretend_vllm, scripted_wrapper
from tests.unit.rollout.fakes import encode, word_tokenizer

EOS = 1
(CLOSING,) = encode(word_tokenizer(), "</search>")
PARIS, FRANCE, DOC = encode(word_tokenizer(), "Paris France Doc")
END = TurnEnd(word_tokenizer(), ["</search>"], [EOS])
CLOSED = Script(lambda context: [PARIS, CLOSING])


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_vllm(monkeypatch)


def wrap(script: Script = CLOSED, **settings: Any) -> Any:
    return scripted_wrapper("colocate", llm=ScriptedLLM(script), **settings)


def test_each_row_has_its_limit_and_its_end() -> None:
    """Closed early, closed by its last allowed token, cut, ended by the end-of-sequence token, filling the window."""
    contexts = [(DOC,), (DOC, DOC), (PARIS,), (FRANCE,), (DOC,) * 10]
    turns = [[PARIS, CLOSING], [PARIS, FRANCE, CLOSING], [PARIS] * 8, [PARIS, PARIS, EOS], [PARIS, PARIS]]
    script = Script(dict(zip(contexts, turns, strict=True)).__getitem__)
    engine = vllm_engine(wrap(script), END)
    generations = take_turns(engine, contexts, [4, 3, 2, 3, 99])
    turns[2] = turns[2][:2]
    assert [g.token_ids for g in generations] == [tuple(turn) for turn in turns]
    assert [g.stopped for g in generations] == [True, True, False, True, False]
    assert all(g.logprobs == (LOGPROB,) * len(g.token_ids) for g in generations)
    assert [settings["max_tokens"] for _, settings in script.asked] == [4, 3, 2, 3, 2]
    assert engine.work == EngineWork(prefilled_tokens=1 + 1 + 1 + 1 + 5, row_steps=1 + 2 + 1 + 2 + 1, steps=3)


def test_rows_do_not_wait_for_each_other() -> None:
    script = Script(lambda context: [PARIS] * len(context) + [CLOSING])
    engine = VLLMColocateEngine(wrap(script), END)
    engine.open(3)
    engine.submit(0, [DOC], 9)
    engine.submit(2, [DOC], 9)
    engine.submit(1, [DOC] * 3, 9)
    assert engine.poll() == [] and not engine.idle
    assert [row for row, _ in engine.poll()] == [0, 2]
    engine.submit(0, [DOC], 9)
    assert [row for _ in range(3) for row, _ in engine.poll()] == [0, 1]
    assert engine.idle and engine.poll() == [] and engine.work.steps == 4
    engine.close()


def test_the_last_token_of_the_window() -> None:
    engine = VLLMColocateEngine(wrap(), END)
    engine.open(2)
    assert engine.window == WINDOW
    engine.submit(0, [DOC] * (WINDOW - 1), 5)
    assert generate_turns(engine, [[DOC]], [1], [1])


def test_how_a_turn_is_sampled() -> None:
    kwargs = {"presence_penalty": 0.2}
    wrapper = wrap(Script(lambda _: [CLOSING]), generation_kwargs=kwargs, structured_outputs_regex="a+", min_p=None)
    take_turns(VLLMColocateEngine(wrapper, END), [(DOC,)], [4])
    ((_, asked),) = wrapper.llm.script.asked
    ends = {"stop": ["</search>"], "include_stop_str_in_output": True, "stop_token_ids": [EOS], "ignore_eos": True}
    others = {"presence_penalty": 0.2, "temperature": 1.0, "min_p": 0.0, "logprobs": 0, "output_kind": "final only"}
    for name, value in {**ends, **others, "skip_special_tokens": False, "max_tokens": 4, "n": 1}.items():
        assert asked[name] == value, name
    assert asked["structured_outputs"].regex == "a+"
    assert wrapper.generation_kwargs is kwargs


def test_seeds() -> None:
    """Of the rollout, the row and its turn, whatever other rows there are; from torch's global generator."""

    def seeds(rows: list[int], seed: int) -> dict[int, list[int]]:
        script = Script(lambda _: [CLOSING])
        engine = VLLMColocateEngine(wrap(script), END)
        torch.manual_seed(seed)
        engine.open(8)
        for _ in range(2):
            generate_turns(engine, [[DOC]] * len(rows), [1] * len(rows), rows)
        asked = [settings["seed"] for _, settings in script.asked]
        return {row: asked[i :: len(rows)] for i, row in enumerate(rows)}

    all_rows = seeds([0, 1, 2, 3, 4, 5, 6, 7], 0)
    assert seeds([5, 2], 0) == {row: all_rows[row] for row in (5, 2)}
    drawn = [seed for own in (all_rows, seeds([*range(8)], 1)) for row in own.values() for seed in row]
    assert len(set(drawn)) == 32 and all(0 <= seed < 2**63 for seed in drawn)


class TestSleeping:
    """TRL's `generate` wakes, syncs and puts to sleep by itself, at every call."""

    ONCE = ("wake weights", "load", "load", "forget", "wake kv_cache")

    @staticmethod
    def two_turns(wrapper: Any) -> list[str]:
        engine = VLLMColocateEngine(wrapper, END)
        engine.open(1)
        for _ in range(2):
            generate_turns(engine, [(DOC,)], [2])
        engine.close()
        return [line for line in wrapper.llm.log if not line.startswith("add")]

    def test_a_rollout_pays_once(self) -> None:
        wrapper = wrap(sleeps=True)
        assert self.two_turns(wrapper) == [*self.ONCE, *["step"] * 4, "sleep 2"]
        assert (wrapper.enable_sleep_mode, wrapper._llm_weights_sleeping) == (True, True)

    def test_weights_that_were_sent_before_the_rollout_are_not_sent_again(self) -> None:
        wrapper = wrap(sleeps=True)
        wrapper.sync_weights()  # as TRL does where a step was made since
        wrapper.llm.log.clear()
        assert self.two_turns(wrapper) == ["wake kv_cache", *["step"] * 4, "sleep 2"]


class TestFailures:
    def test_what_is_unfinished_is_aborted_and_nothing_cached_is_trusted(self) -> None:
        wrapper = wrap()
        engine = VLLMColocateEngine(wrapper, END)
        wrapper.llm.llm_engine.step = self.fail
        with pytest.raises(ZeroDivisionError):
            take_turns(engine, [(DOC,)] * 2, [4, 4])
        one, other, *after = wrapper.llm.log
        assert after == [each.replace("add ", "abort ") for each in (one, other)] + ["forget"] and one != other
        wrapper.llm.llm_engine.step = wrapper.llm.step
        assert [g.token_ids for g in take_turns(engine, [(DOC,)], [4])] == [(PARIS, CLOSING)]

    @staticmethod
    def fail() -> None:
        raise ZeroDivisionError


def test_a_released_row_generates_no_more() -> None:
    wrapper = wrap()
    engine = VLLMColocateEngine(wrapper, END)
    engine.open(3)
    engine.submit(0, [DOC], 9)
    engine.poll()
    engine.submit(1, [DOC], 9)
    for row in (0, 1, 2):  # generating, submitted, never begun
        engine.release(row)
    assert engine.idle and engine.poll() == []
    added, *after = wrapper.llm.log
    assert after == ["step", added.replace("add ", "abort ")]


class TestTensorParallelism:
    """Two ranks in two threads, each with its half of one engine; what they gather is exchanged for real."""

    @pytest.fixture
    def ranks(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        barrier = threading.Barrier(2, timeout=20.0)
        said: dict[int, Any] = {}
        own = threading.local()

        def all_gather_object(gathered: list[Any], mine: Any, group: str) -> None:
            assert group == "the group"
            said[own.rank] = mine
            barrier.wait()
            gathered[:] = [said[0], said[1]]
            barrier.wait()

        monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather_object)
        engines = []
        for rank in (0, 1):
            wrapper = wrap(Script(lambda context: [PARIS] * context[0] + [CLOSING]), tensor_parallel_size=2)
            wrapper.tp_group = "the group"
            wrapper.accelerator = type("Rank", (), {"process_index": rank})()
            engines.append(VLLMColocateEngine(wrapper, END))
        self.own = own
        return engines

    def run(self, ranks: list[Any], act: Any) -> list[Any]:
        results: list[Any] = [None, None]

        def of_rank(rank: int) -> None:
            self.own.rank = rank
            results[rank] = act(rank, ranks[rank])

        threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
        return results

    def test_all_ranks_have_one_engine_do_the_same(self, ranks: list[Any]) -> None:
        """Rank 1 has one short row, and goes on polling; rank 0 gives a row up."""
        assert all(engine.polls_together for engine in ranks)

        def act(rank: int, engine: Any) -> list[tuple[int, int]]:
            engine.open(3)
            for row in range(1 if rank else 3):
                engine.submit(row, [2 + row + rank], 9)
            ended = []
            for poll in range(8):
                if rank == 0 and poll == 2:
                    engine.release(1)
                ended += [(row, len(generation.token_ids)) for row, generation in engine.poll()]
            assert engine.idle
            engine.close()
            return ended

        ended = self.run(ranks, act)
        assert ended == [[(0, 3), (2, 5)], [(0, 4)]]
        logs = [engine._vllm.llm.log for engine in ranks]
        assert logs[0] == logs[1]
        added = [line for line in logs[0] if line.startswith("add")]
        assert len(added) == len({*added}) == 4
        assert added[1].replace("add ", "abort ") in logs[0] and logs[0].count("step") == 5
        seeds = [[settings["seed"] for _, settings in engine._vllm.llm.script.asked] for engine in ranks]
        assert seeds[0] == seeds[1]
