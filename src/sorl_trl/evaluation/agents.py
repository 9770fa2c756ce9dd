"""A policy with everything that an evaluation needs to ask it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sorl_trl import qa
from sorl_trl.rollout import Collector, Engine, Generator
from sorl_trl.rollout.greetings import Greeter


@dataclass(frozen=True)
class Agent:
    """A policy with everything that an evaluation needs to ask it."""

    collector: Collector
    generator: Generator | Engine
    rows: Callable[[Sequence[qa.Question]], list[dict[str, Any]]]
    """Makes a row per question, with its `prompt`. The environment gets the whole row."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template beside the messages."""

    def encoded(self, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """The token ids of the prompts, with what the environment of each row says at the beginning."""
        collector = self.collector
        greeter = Greeter(collector.tokenizer, collector.protocol, collector.limits.max_observation_tokens)
        prompts = greeter.add([row["prompt"] for row in rows], collector.responder.greet(rows))
        return qa.encode_prompts(collector.tokenizer, [{"prompt": each} for each in prompts], **self.template_kwargs)
