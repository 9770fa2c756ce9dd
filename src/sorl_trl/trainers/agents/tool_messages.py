"""What the environment says, in plain form: every character is known before a chat template writes it.

transformers gives templates plain data only: whatever is in a message is rebuilt from strings, numbers, lists, tuples
and dictionaries, and what it does not know becomes a placeholder. The same is done here first, and each string changed
on the way. So no class of object can bring in text that was not seen, and what is harmless is shown as ever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from sorl_trl.text import round_brackets

Change: TypeAlias = Callable[[str], str]
Content: TypeAlias = "str | list[Any]"

MAX_WEAKER_FORMS = 3
"""So many does `weaker_forms` give at the most."""
_TEXT_BLOCK = ("type", "text")
"""The keys of a content block of text."""


def plain_data(value: Any, change: Change) -> Any:
    """`value` as templates are shown it, each string changed, keys and placeholders too, but no image of a block."""
    if value is None or type(value) in (int, float, bool):
        return value
    if isinstance(value, str):
        return change(str.__str__(value))
    for number in (int, float):
        if isinstance(value, number):
            return number(value)
    if isinstance(value, Mapping):
        return _plain_mapping(value, change)
    if isinstance(value, (list, tuple)):
        items = [plain_data(item, change) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, np.generic):
        return plain_data(value.item(), change)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_data(getattr(value, field.name), change) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):  # pydantic
        return plain_data(value.model_dump(), change)
    return change(f"<{type(value).__name__}>")


def text_of(value: Any) -> str:
    """`str(value)`, whatever class of string that is."""
    return str.__str__(str(value))


@dataclasses.dataclass(frozen=True)
class OwnContent:
    """What a message said before the environment added to it."""

    text: str
    blocks: int
    """How many content blocks there were, 0 for plain text."""

    @classmethod
    def of(cls, prompt: Any) -> OwnContent:
        """Of the last message; to a prompt that is plain text no environment can add."""
        content = "" if isinstance(prompt, str) else prompt[-1].get("content")
        return cls(shown_text(content), len(content) if isinstance(content, list) else 0)

    def begins(self, content: Any) -> bool:
        """Whether `content` goes on from here. If not, the environment has rewritten it."""
        return shown_text(content).startswith(self.text)


def change_beyond(own: OwnContent, content: Any, change: Change) -> Content:
    """The content of a message that begins with the user's own: what comes after it changed, in plain form."""
    left = len(own.text)
    if not isinstance(content, list):
        text = text_of(content)
        return text[:left] + change(text[left:]) if len(text) > left else text
    blocks = []
    for i, block in enumerate(content):
        text = block["text"] if left and _is_text(block) else ""
        if len(text) > left:
            block = {**block, "text": text[:left] + change(text[left:])}
        elif not left and i >= own.blocks:
            block = plain_data(block, change)
        left = max(left - len(text), 0)
        blocks.append(block)
    return blocks


def weaker_forms(content: Content, sanitize: Change) -> Iterator[Content]:
    """What to try, one after the other, where a template makes of plain content more than stands in it.

    Text instead of a list; text without brackets; nothing. Blocks with an image stay blocks as long as they can.
    """
    if isinstance(content, list) and any(map(_is_image, content)):
        yield plain_data(content, round_brackets)
        yield list(filter(_is_image, content))
    else:
        text = content if isinstance(content, str) else sanitize(text_of(content))
        if isinstance(content, list):
            yield text
        yield round_brackets(text)
    yield ""


def neutral_messages(messages: list[dict[str, Any]], with_images: bool) -> list[dict[str, Any]]:
    """Messages of the same shape that say nothing, perhaps with their images: what a template writes for the shape."""
    return [{**message, "name": "x", "content": _neutral(message["content"], with_images)} for message in messages]


def shown_text(content: Any) -> str:
    """The text of a message's content, its blocks joined: some templates write them one right after the other."""
    if isinstance(content, list):
        return "".join(block["text"] for block in content if _is_text(block))
    return "" if content is None else text_of(content)


def _plain_mapping(value: Mapping[Any, Any], change: Change) -> dict[Any, Any]:
    plain = {plain_data(key, change): plain_data(part, change) for key, part in value.items()}
    if _is_image(plain) and not isinstance(value.get("image"), (str, type(None))):
        plain["image"] = value["image"]  # which a processor must be able to load
    return plain


def _is_text(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "text" and type(block.get("text")) is str


def _is_image(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "image"


def _neutral(value: Any, with_images: bool) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_neutral(item, with_images) for item in value)
    if _is_image(value):
        return {name: value[name] if with_images else "image" for name in ("type", "image") if name in value}
    if isinstance(value, dict):
        names = [name if name in _TEXT_BLOCK else f"k{i}" for i, name in enumerate(value)]
        parts = [_neutral(part, with_images) for part in value.values()]
        kind = {"type": "text"} if value.get("type") == "text" else {}
        return {**dict(zip(names, parts, strict=True)), **kind}
    return "x" if isinstance(value, str) and value.strip() else value
