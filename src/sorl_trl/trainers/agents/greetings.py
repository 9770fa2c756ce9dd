"""What an environment says before the first turn, at the end of the prompt and made harmless."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from sorl_trl.rollout.protocol import TagProtocol
from sorl_trl.rollout.sanitize import Sanitizer
from sorl_trl.rollout.tokens import decode
from sorl_trl.text import round_brackets


class Greeter:
    """Adds to prompts, as TRL adds what `reset` of an environment returns.

    Args:
        tokenizer: Of the policy.
        protocol: Whose tags a greeting must not hold.
        max_tokens: Of one greeting; a longer one is cut.

    Attributes:
        neutralized: How many control tokens and protocol tags there were in all greetings so far.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, protocol: TagProtocol, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._sanitizer = Sanitizer(tokenizer, protocol)
        self._max_tokens = max_tokens
        self.neutralized = 0

    def add(self, prompts: Sequence[Any], greetings: Sequence[str | None]) -> list[Any]:
        """The prompts, text or messages, each with its greeting; the user's own are left as they are."""
        return [
            self._greeted(prompt, said) if said else prompt for prompt, said in zip(prompts, greetings, strict=True)
        ]

    def _greeted(self, prompt: Any, said: str) -> Any:
        if isinstance(prompt, str):
            return prompt + self._harmless(prompt, said)
        content = prompt[-1].get("content") or ""
        if isinstance(content, list):
            own = "".join(block.get("text", "") for block in content)
            content = [*content, {"type": "text", "text": self._harmless(own, said)}]
        else:
            content += self._harmless(content, said)
        return [*prompt[:-1], {**prompt[-1], "content": content}]

    def _harmless(self, own: str, said: str) -> str:
        harmless = self._sanitizer.sanitize(said, self._max_tokens)
        self.neutralized += harmless.neutralized
        text = decode(self._tokenizer, harmless.token_ids) if harmless.truncated else harmless.text
        # The prompt's end and the greeting may be the halves of a tag.
        joined = self._sanitizer.rewrite(own + text)[1] - self._sanitizer.rewrite(own)[1]
        self.neutralized += max(joined, 0)
        return round_brackets(text) if joined > 0 else text
