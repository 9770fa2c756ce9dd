"""Serves a policy through the API that training uses, to develop agents before training or run them afterwards."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

from sorl_trl.endpoint.conversation import Conversation
from sorl_trl.endpoint.messages import ChatFormat
from sorl_trl.endpoint.server import CallLimits, Endpoint, Run
from sorl_trl.rollout import Engine
from sorl_trl.rollout.chat import RolloutSetup
from sorl_trl.rollout.turns import ApiTurns

_MOST_CONTEXTS = 64
"""How many conversations are kept, so that their tokens need not be recomputed."""


def serve_policy(
    engine: Engine,
    setup: RolloutSetup,
    host: str,
    listener: socket.socket,
    api_key: str | None,
    on_ready: Callable[[str, str], None],
) -> None:
    """Serve a policy until the process is interrupted, as `EndpointRollout` does.

    Args:
        engine: Samples from the policy.
        setup: The policy's tokenizer, and the most tokens of a turn.
        host: The address for clients.
        listener: A socket that listens there.
        api_key: None to generate one.
        on_ready: Called with the base URL and the key.

    Raises the errors of the engine.
    """
    turns = ApiTurns(engine, 1, rejoin_after=0)
    engine.open(1)
    try:
        conversation = Conversation(ChatFormat.of(setup), most_contexts=_MOST_CONTEXTS)
        limits = CallLimits(setup.limits.max_turn_tokens, None, engine.window)
        run = Run(0, conversation, turns, limits, engine.constrains)
        run.key = api_key or run.key
        endpoint = Endpoint(host, listener)
        endpoint.admit([run])
        on_ready(endpoint.base_url, run.key)
        with suppress(KeyboardInterrupt):
            turns.serve()
    finally:
        engine.close()
