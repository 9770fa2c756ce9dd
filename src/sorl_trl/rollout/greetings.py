"""Adds what an environment says before the first turn to the end of the prompt, sanitized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from sorl_trl.rollout.observation import Sanitizer
from sorl_trl.rollout.protocol import TagProtocol
from sorl_trl.rollout.tokens import decode
from sorl_trl.text import round_brackets


class Greeter:
    """Sanitizes text that is added to prompts, and leaves the user's own text alone.

    Args:
        tokenizer: The policy's tokenizer.
        protocol: The protocol whose tags a greeting must not contain.
        max_tokens: Longer greetings are cut to this length. None cuts nothing.

    Attributes:
        neutralized: How many control tokens and protocol tags all greetings so far contained.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, protocol: TagProtocol | None = None, max_tokens: int | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._sanitizer = Sanitizer(tokenizer, protocol)
        self._max_tokens = max_tokens
        self.neutralized = 0

    def add(self, prompts: Sequence[Any], greetings: Sequence[str | None]) -> list[Any]:
        """The prompts, as text or messages, each with its greeting."""
        return [
            self._greeted(prompt, said) if said else prompt for prompt, said in zip(prompts, greetings, strict=True)
        ]

    def clean(self, own: Any, content: Any) -> Any:
        """The content of a message, with everything that an environment has added to the user's `own` sanitized.

        If the content does not begin with `own`, the environment has rewritten it, and all of it is sanitized.
        """
        if not isinstance(content, list):
            kept = own if isinstance(own, str) and content.startswith(own) else ""
            return kept + self._harmless(kept, content[len(kept) :])
        blocks = list(own) if isinstance(own, list) else [{"type": "text", "text": own}]
        if content[: len(blocks)] != blocks:
            blocks = []
        for block in content[len(blocks) :]:
            blocks.append(self._harmless_block(shown_text(blocks), block))
        return blocks

    def _harmless_block(self, own: str, block: Any) -> dict[str, Any]:
        """Keep an image, with its path sanitized if it has one; turn anything else into text."""
        if is_image(block):
            image = block["image"]
            return {"type": "image", "image": self._harmless(own, image) if isinstance(image, str) else image}
        return {
            "type": "text",
            "text": self._harmless(own, str.__str__(block["text"] if is_text(block) else str(block))),
        }

    def _greeted(self, prompt: Any, said: str) -> Any:
        if isinstance(prompt, str):
            return prompt + self._harmless(prompt, said)
        own = prompt[-1].get("content") or ""
        added: Any = [{"type": "text", "text": said}] if isinstance(own, list) else said
        return [*prompt[:-1], {**prompt[-1], "content": self.clean(own, own + added)}]

    def _harmless(self, own: str, said: str) -> str:
        most = self._max_tokens
        harmless = self._sanitizer.sanitize(said, len(said) if most is None else most)
        self.neutralized += harmless.neutralized
        is_cut = most is not None and harmless.truncated  # a text may have more tokens than characters
        text = decode(self._tokenizer, harmless.token_ids) if is_cut else harmless.text
        # The end of the prompt and the beginning of the greeting may form a tag.
        joined = self._sanitizer.rewrite(own + text)[1] - self._sanitizer.rewrite(own)[1]
        self.neutralized += max(joined, 0)
        return round_brackets(text) if joined > 0 else text


def shown_text(blocks: Sequence[Any]) -> str:
    """The joined text of content blocks, which some templates write without anything between them."""
    return "".join(block["text"] for block in blocks if is_text(block))


def is_text(block: Any) -> bool:
    """Whether a content block is text."""
    return isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str)


def is_image(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "image" and "image" in block
