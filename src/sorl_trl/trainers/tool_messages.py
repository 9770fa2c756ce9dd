"""What the environment says, in forms of which every character is known before a template writes it.

A chat template writes out whatever it is given: `str` of a list calls the `__repr__` of all that is in it. So content
is brought into plain form first, by a list of what is known rather than of what is dangerous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Change = Callable[[str], str]
Content = str | list[Any]

_SCALARS = (bool, int, float, type(None))
_BLOCKS = ("text", "image")
"""Types of content blocks that TRL passes on from a tool."""
_MAX_DEPTH = 50
_NO_BRACKETS = str.maketrans("<>[]", "()()")


def text_of(value: Any) -> str:
    """`str(value)`, whatever class of string that is."""
    return str.__str__(str(value))


def is_plain_list(content: Any) -> bool:
    """Whether a template may be given this list as a list.

    It may where the parts are strings, numbers, booleans or None in lists, tuples and dictionaries, each of exactly
    that type, and where they are content blocks.
    """
    return type(content) is list and (_are_blocks(content) or _is_plain(content, _MAX_DEPTH))


def change_strings(content: list[Any], change: Change) -> list[Any]:
    """A plain list with each string in it changed, keys too. What else a block holds becomes text, but its image."""
    return [_map_strings(item, change, _MAX_DEPTH) for item in content]


def change_beyond(own: str, content: Any, change: Change) -> Content:
    """The content of a message that begins with the user's `own` text: what comes after it changed, in plain form.

    Content that does not begin so is changed from the start.
    """
    if type(content) is list:
        left = len(own) if shown_text(content).startswith(own) else 0
        blocks = []
        for block in content:
            text = block["text"] if left and _is_text(block) else None
            if text is not None and len(text) > left:
                block = {**block, "text": text[:left] + change(text[left:])}
            elif not left:
                block = _map_strings(block, change, _MAX_DEPTH)
            left = max(left - len(text or ""), 0)
            blocks.append(block)
        return blocks
    text = text_of(content)
    start = len(own) if text.startswith(own) else 0
    return text[:start] + change(text[start:]) if len(text) > start else text


def weaker_forms(content: Content, sanitize: Change) -> list[Content]:
    """What to try, one after the other, where a template makes of plain content more than stands in it.

    Text instead of a list; text without brackets; nothing. Blocks with an image stay blocks as long as they can.
    """
    if isinstance(content, str):
        return [without_brackets(content), ""]
    if any(map(_is_image, content)):
        return [change_strings(content, without_brackets), list(filter(_is_image, content)), ""]
    text = sanitize(text_of(content))
    return [text, without_brackets(text), ""]


def without_brackets(text: str) -> str:
    """The text with round brackets for the others, of which control tokens and tags are made."""
    return text.translate(_NO_BRACKETS)


def neutral_messages(messages: list[dict[str, Any]], with_images: bool) -> list[dict[str, Any]]:
    """Messages of the same shape that say nothing, perhaps with their images: what a template writes for the shape."""
    return [{**message, "name": "x", "content": _neutral(message["content"], with_images)} for message in messages]


def shown_text(content: Any) -> str:
    """The text of a message's content, its blocks joined: some templates write them one right after the other."""
    if isinstance(content, list):
        return "".join(block["text"] for block in content if _is_text(block))
    return "" if content is None else text_of(content)


def _is_text(block: Any) -> bool:
    return type(block) is dict and block.get("type") == "text" and type(block.get("text")) is str


def _is_image(block: Any) -> bool:
    return type(block) is dict and block.get("type") == "image"


def _are_blocks(content: list[Any]) -> bool:
    """Whether these are content blocks, rather than rows of a table, as which a list of dictionaries may be meant."""
    kinds = [block.get("type") if type(block) is dict else None for block in content]
    return bool(kinds) and all(type(kind) is str and kind in _BLOCKS for kind in kinds)


def _is_plain(value: Any, depth: int) -> bool:
    if type(value) in (list, tuple):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    if type(value) is dict:
        return depth > 0 and all(_is_plain(part, depth - 1) for item in value.items() for part in item)
    return type(value) in (str, *_SCALARS)


def _map_strings(value: Any, change: Change, depth: int) -> Any:
    """`value` with each string in it changed; what is not plain becomes text, but for the image of a block."""
    if type(value) in (list, tuple) and depth:
        return type(value)(_map_strings(item, change, depth - 1) for item in value)
    if type(value) is dict and depth:
        changed = {
            _map_strings(key, change, depth - 1): _map_strings(part, change, depth - 1) for key, part in value.items()
        }
        image = value.get("image")
        if _is_image(value) and "image" in value and not isinstance(image, str):
            changed["image"] = image
        return changed
    return value if type(value) in _SCALARS else change(text_of(value))


def _neutral(value: Any, with_images: bool) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_neutral(item, with_images) for item in value)
    if _is_image(value):
        return {name: value[name] if with_images else "image" for name in ("type", "image") if name in value}
    if type(value) is dict and value.get("type") == "text" and "text" in value:
        return {"type": "text", "text": _neutral(value["text"], with_images)}
    if type(value) is dict:
        return {f"k{i}": _neutral(part, with_images) for i, part in enumerate(value.values())}
    return "x" if isinstance(value, str) and value.strip() else value
