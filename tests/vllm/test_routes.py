"""The experts that vLLM reports: those of one plain pass over what a row has read, colocated and over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from examples.quickstart import PROTOCOL

from sorl_trl.rollout import TurnEnd, generate_turns
from sorl_trl.rollout.engines.vllm import vllm_engine
from sorl_trl.rollout.routing import Routers
from tests.agents import agent_tokenizer, logged
from tests.vllm.policies import WINDOW, largest_difference, save_policy, vllm_agent, wrap
from tests.vllm.servers import serving

END = TurnEnd(agent_tokenizer(), PROTOCOL.stop_strings, [agent_tokenizer().eos_token_id])
SHAPE = {"num_hidden_layers": 3, "num_key_value_heads": 2, "num_experts_per_tok": 2, "sharpness": 8.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"head_dim": 32, "num_experts": 8, "moe_intermediate_size": 32, "mlp_only_layers": [0]},
    "Olmoe": {"num_experts": 8},
}
"""The first layer of the first one has no router."""


@pytest.fixture(params=[("Qwen3Moe", "colocate"), ("Olmoe", "colocate"), ("Qwen3Moe", "server")], ids="-".join)
def wrapper(request: pytest.FixtureRequest, tmp_path: Path, engines: list[Any]) -> Iterator[Any]:
    family, mode = request.param
    AcceleratorState._reset_state(reset_partial_state=True)  # it counts on the process group of an engine that ended
    policy = save_policy(tmp_path / "policy", family=family, **SHAPE, **FAMILIES[family])
    if mode == "colocate":
        yield wrap(policy, routes=True)
        return
    flag = "--enable-return-routed-experts"
    with serving(policy, WINDOW, tmp_path / "output.txt", "float32", flag) as served:
        yield wrap(policy, mode="server", server_base_url=served.url)


def check_turns(engine: Any, model: Any) -> None:
    """Three greedy turns of rows of several lengths: the experts of all that is read are those of one pass."""
    contexts = [[5, 6], [7, 8, 9, 10, 11, 12, 13], [5, 6], [9] * 17]
    found: list[Any] = [None for _ in contexts]
    engine.open(len(contexts))
    for observation in ([7, 8], [], [9, 10, 11]):
        turns = generate_turns(engine, contexts, [5] * len(contexts))
        for row, turn in enumerate(turns):
            found[row] = turn.routes
            contexts[row] = [*contexts[row], *turn.token_ids]
            assert len(turn.routes) == len(contexts[row]) - 1
        contexts = [[*context, *observation] for context in contexts]
    engine.close()
    routers = Routers(model)
    for context, routes in zip(contexts, found, strict=True):
        with torch.no_grad(), routers.replayed() as experts:
            model(input_ids=torch.tensor([context]))
            expected = experts().numpy()[:-4]
        assert routes.dtype == np.uint8 and np.sort(routes).tolist() == np.sort(expected).tolist()


def test_they_are_those_of_one_plain_pass_also_after_an_update(wrapper: Any) -> None:
    engine = vllm_engine(wrapper, END)
    engine.report_routes()
    check_turns(engine, wrapper.model.eval())
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in wrapper.model.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std() / 2)
    wrapper.sync_weights()
    check_turns(engine, wrapper.model)


def test_a_trainer_replays_them(tmp_path: Path, engines: list[Any]) -> None:
    save_policy(tmp_path / "policy", family="Qwen3Moe", **SHAPE, **FAMILIES["Qwen3Moe"])
    trainer = vllm_agent(tmp_path, router_replay="r3")
    trainer.train()
    assert largest_difference(logged(trainer, "router_replay/logp_gap")) < 1e-4
    rerouted = logged(trainer, "router_replay/rerouted")
    assert max(rerouted[::2]) < 0.05 < max(rerouted[1::2]), "the second update on a rollout finds another policy"
