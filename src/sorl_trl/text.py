"""Cleans and reads text from outside."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

_USER_OF_URL = re.compile(r"(?<=://)[^/?#\s]*@")
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


def encodable(text: str, half: str = "\N{REPLACEMENT CHARACTER}") -> str:
    """Replace each lone surrogate, which JSON can express but UTF-8 cannot encode, with `half`.

    Two halves in a row that form a character become that character.
    """
    if not _HALF_CHARACTER.search(text):
        return text
    return _HALF_CHARACTER.sub(half, text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass"))


def storable(value: Any) -> Any:
    """Make every text in a value of dictionaries, lists and tuples `encodable`, with question marks."""
    if isinstance(value, str):
        return encodable(value, "?")
    if isinstance(value, dict):
        return {name: storable(each) for name, each in value.items()}
    return [storable(each) for each in value] if isinstance(value, list | tuple) else value


def nests(value: Any, levels: int) -> bool:
    """Whether JSON data has more than this many levels of lists and objects. Data of any depth can be checked.

    A policy that repeats a bracket writes such data. Code that walks over it, such as `copy.deepcopy`, `pickle` and
    `repr`, would exceed Python's recursion limit.
    """
    level = [value]
    while (level := [each for each in level if isinstance(each, dict | list)]) and levels:
        level = [each for values in level for each in (values.values() if isinstance(values, dict) else values)]
        levels -= 1
    return bool(level)


def json_object(line: bytes, kind: str, needs: Sequence[str] = ()) -> dict[str, Any]:
    """Read a line of a UTF-8 JSONL file; `kind` names what it should be.

    Raises ValueError if it is not an object, or lacks a field that it `needs`; the message lists the fields found.
    """
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos})") from error
    if not isinstance(record, dict):
        raise ValueError(f"{kind} must be a JSON object, got {type(record).__name__}")
    if absent := [f"`{name}`" for name in needs if record.get(name) is None]:
        raise ValueError(f"{kind} needs {', '.join(absent)}, got fields {sorted(record)}")
    return record


def identifier(name: str, value: object) -> str:
    """Return a string or an integer as a string. For anything else, raise a ValueError that names the field."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"`{name}` must be a string or an integer, got {value!r}")
    return str(value)


def one_line(text: object) -> str:
    """Put the text of an object, such as an error, into one line. An object without text gives its class's name."""
    return " ".join(str(text).split()) or ("" if isinstance(text, str) else type(text).__name__)


def without_user(text: str) -> str:
    """Remove user and password from each URL: `http://me:secret@host/path` becomes `http://host/path`.

    Use it for everything shown or stored: messages, settings, the name of an index.
    """
    return _USER_OF_URL.sub("", text)
