"""The command `sorl serve-policy`: serves a policy behind the APIs of OpenAI and Anthropic, as in training."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sorl_trl.checks import NOT_NEGATIVE
from sorl_trl.cli.evaluate import find_policy, read_recipe
from sorl_trl.command_line import Parser, UserMistake, at_least, listen, mistakes

if TYPE_CHECKING:  # like all that follows, it takes seconds
    from sorl_trl.evaluation.policy import Parts

ABOUT = """\
Serves a policy behind the APIs of OpenAI and Anthropic, as training does, until Ctrl-C. Prints the
environment variables that an agent needs. RUN is the output folder of `sorl train`, a checkpoint in it, a PEFT
adapter's folder, or any model's folder or Hub id; the recipe of a run sets the default values.

example: sorl serve-policy runs/mine --port 8000
"""
MOST_CONTEXTS = 64
"""How many conversations are kept, so that their tokens need not be recomputed."""


def main(words: Sequence[str]) -> None:
    """Run `sorl serve-policy` until Ctrl-C."""
    options = _parser().parse_args(words)
    policy, recipe = find_policy(options.run), read_recipe(Path(options.run), ())
    with mistakes():
        NOT_NEGATIVE.check("temperature", options.temperature)
        parts = parts_of(
            policy, {**recipe, **{name: each for name, each in vars(options).items() if each is not None}}
        )
        if parts.tokenizer.chat_template is None:
            raise UserMistake(f"{policy} has no chat template, which API calls need: use a chat model")
    serve(parts, options)


def parts_of(policy: str, given: Mapping[str, Any]) -> Parts:
    """What asks the policy, of which only the limit of a turn applies to API calls."""
    from sorl_trl.evaluation.arguments import read_template_kwargs
    from sorl_trl.evaluation.policy import ModelArguments, Parts
    from sorl_trl.rollout import EngineOptions, RolloutArguments
    from sorl_trl.search import SearchArguments

    def chosen(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names if given.get(name) is not None}

    return Parts(
        ModelArguments(policy, **chosen("dtype", "attn_implementation", "trust_remote_code")),
        RolloutArguments(**chosen("max_turn_tokens")),
        EngineOptions(**chosen("rollout_engine", "kv_cache_gib")),
        SearchArguments(),
        max_completion_length=None,
        chat_template_kwargs=read_template_kwargs(given.get("chat_template_kwargs")),
    )


def serve(parts: Parts, options: Namespace) -> None:
    """Load the policy, and serve it with one endless trajectory, as `EndpointRollout` does."""
    from accelerate import PartialState
    from torch import accelerator

    from sorl_trl.endpoint.agents import Access
    from sorl_trl.endpoint.conversation import Conversation
    from sorl_trl.endpoint.messages import ChatFormat
    from sorl_trl.endpoint.run import CallLimits, Run
    from sorl_trl.endpoint.server import Endpoint
    from sorl_trl.evaluation.policy import generation_config
    from sorl_trl.rollout.turns import ApiTurns

    with mistakes():
        listener = listen(options.host, options.port)  # clients wait while the policy is loaded
        device = PartialState(cpu=not accelerator.is_available()).device
        setup, engine = parts.load(device, generation_config(options.temperature), in_chat=True)
    turns = ApiTurns(engine, 1, rejoin_after=0)
    engine.open(1)
    try:
        conversation = Conversation(ChatFormat.of(setup), most_contexts=MOST_CONTEXTS)
        limits = CallLimits(setup.limits.max_turn_tokens, None, engine.window)
        run = Run(0, conversation, turns, limits, engine.constrains)
        run.key = options.api_key or run.key
        endpoint = Endpoint(options.host, listener)
        endpoint.admit([run])
        for name, value in Access(endpoint.base_url, run.key).environment.items():
            print(f"export {name}={value}", flush=True)
        with suppress(KeyboardInterrupt):
            turns.serve()
    finally:
        engine.close()


def _parser() -> Parser:
    parser = Parser(prog="sorl serve-policy", description=ABOUT)
    parser.add_argument("run", metavar="RUN", help="the run or the model to serve")
    parser.add_address()
    parser.add_argument("--api_key", metavar="KEY", help="API key that clients must send (default: a random one)")
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (default: %(default)s)"
    )
    parser.add_argument(
        "--max_turn_tokens",
        type=at_least(1),
        metavar="N",
        help="the most tokens of a reply (default: the recipe's, or 500)",
    )
    parser.add_argument(
        "--rollout_engine", metavar="NAME", help="auto, slots or lockstep (default: the recipe's, or auto)"
    )
    return parser
