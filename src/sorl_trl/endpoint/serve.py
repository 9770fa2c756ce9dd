"""Serves a policy through the API that training uses, to develop an agent against it, or to use it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from sorl_trl.agents.chat import RolloutSetup
from sorl_trl.endpoint.conversation import Conversation
from sorl_trl.endpoint.messages import ChatFormat
from sorl_trl.endpoint.server import CallLimits, Endpoint, Run
from sorl_trl.endpoint.turns import TurnQueue
from sorl_trl.rollout import Engine

_MOST_CONTEXTS = 64
"""How many conversations are remembered, whose tokens then need not be computed again."""


def serve_policy(
    engine: Engine,
    setup: RolloutSetup,
    host: str,
    port: int,
    api_key: str | None,
    on_ready: Callable[[str, str], None],
) -> None:
    """Serve a policy until the process is interrupted, as `EndpointRollout` does.

    Args:
        engine: Samples from the policy.
        setup: Its tokenizer, and the most tokens of a turn.
        host: The address to listen at.
        port: 0 takes a free one.
        api_key: None makes one.
        on_ready: Gets the base URL and the key.

    Raises OSError if the address cannot be taken, and what the engine raises.
    """
    queue = TurnQueue(1, rejoin_after=0)
    engine.open(1)
    try:
        conversation = Conversation(ChatFormat.of(setup), most_contexts=_MOST_CONTEXTS)
        limits = CallLimits(setup.limits.max_turn_tokens, None, engine.window)
        run = Run(0, conversation, queue, limits, engine.constrains)
        run.key = api_key or run.key
        endpoint = Endpoint(host, port)
        endpoint.admit([run])
        on_ready(endpoint.base_url, run.key)
        with suppress(KeyboardInterrupt):
            queue.serve(engine)
    finally:
        engine.close()
