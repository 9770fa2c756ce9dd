"""The command `sorl serve-policy`: serves a policy at an OpenAI-compatible address, as training does for agents."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sorl_trl.checks import NOT_NEGATIVE
from sorl_trl.cli.evaluate import find_policy, read_recipe
from sorl_trl.command_line import Parser, UserMistake, at_least, listen, mistakes, port

ABOUT = """\
Serves a policy at an OpenAI-compatible address, through the API that training uses, until Ctrl-C. Prints the
environment variables that an agent needs. RUN is the output folder of `sorl train`, a checkpoint in it, a PEFT
adapter's folder, or any model's folder or Hub id; the recipe of a run sets the default values.

example: sorl serve-policy runs/mine --port 8000
"""
OF_MODEL = ("dtype", "attn_implementation", "trust_remote_code")
OF_ENGINE = ("rollout_engine", "kv_cache_gib")
OF_TURNS = ("max_turn_tokens",)
"""Arguments of a recipe for the model, the engine, and the limits of a turn."""


def main(words: Sequence[str]) -> None:
    """Run `sorl serve-policy` until Ctrl-C."""
    options = _parser().parse_args(words)
    serve(options, find_policy(options.run), read_recipe(Path(options.run), ()))


def serve(options: Namespace, policy: str, recipe: Mapping[str, Any]) -> None:
    """Load a policy and serve it. Raises UserMistake if a value is invalid, or the policy cannot be loaded."""
    from accelerate import PartialState  # like all that follows, it takes seconds
    from torch import accelerator

    from sorl_trl.endpoint.serve import serve_policy
    from sorl_trl.evaluation.arguments import read_template_kwargs
    from sorl_trl.evaluation.policy import ModelArguments, Parts, generation_config
    from sorl_trl.rollout import EngineOptions, RolloutArguments
    from sorl_trl.search import SearchArguments

    given = {**recipe, **{name: value for name, value in vars(options).items() if value is not None}}
    with mistakes():
        NOT_NEGATIVE.check("temperature", options.temperature)
        parts = Parts(
            ModelArguments(policy, **_those(OF_MODEL, given)),
            RolloutArguments(**_those(OF_TURNS, given)),
            EngineOptions(**_those(OF_ENGINE, given)),
            SearchArguments(),
            max_completion_length=None,
            chat_template_kwargs=read_template_kwargs(recipe.get("chat_template_kwargs")),
        )
        if parts.tokenizer.chat_template is None:
            raise UserMistake(f"{policy} has no chat template, which API calls need: use a chat model")
        listener = listen(options.host, options.port)  # clients wait while the policy is loaded
        device = PartialState(cpu=not accelerator.is_available()).device
        setup, engine = parts.load(device, generation_config(options.temperature), in_chat=True)
    serve_policy(engine, setup, options.host, listener, options.api_key, _show)


def _those(names: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in names if given.get(name) is not None}


def _show(base_url: str, api_key: str) -> None:
    print(f"export OPENAI_BASE_URL={base_url}\nexport OPENAI_API_KEY={api_key}", flush=True)


def _parser() -> Parser:
    parser = Parser(prog="sorl serve-policy", description=ABOUT)
    parser.add_argument("run", metavar="RUN", help="the run or the model to serve")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=port, default=8000, metavar="N", help="0 chooses a free one (default: %(default)s)"
    )
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
