"""Sanitizes the environment's text in observations and prompts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from sorl_trl.rollout.environment import Reply
from sorl_trl.rollout.protocol import ChatProtocol, Frame, TagProtocol
from sorl_trl.rollout.trajectories import control_tokens, decode
from sorl_trl.text import encodable
from sorl_trl.types import Observation, Passage, ToolResult

_OTHER_BRACKETS = str.maketrans("<>[]", "[]()")
_ROUND_BRACKETS = str.maketrans("<>[]", "()()")
_MAX_PASSES = 3
_CHARACTERS_PER_TOKEN = 8
_MARGIN = 256
"""The most tokens that a cut at the end of a text may change: a WordPiece word has up to 100."""


@dataclass(frozen=True)
class SanitizedText:
    """A sanitized text."""

    text: str
    """The text. Encoded, it contains no control token; decoded again, no protocol tag."""
    token_ids: tuple[int, ...]
    """The token ids of the beginning of `text`."""
    truncated: bool
    """Whether the untrusted text continued after `token_ids`."""
    neutralized: int
    """How many control tokens and protocol tags the untrusted text contained."""


class Sanitizer:
    """Makes text harmless for one tokenizer and the tags of one protocol.

    Tags and control tokens that the text spells out get other brackets: `<answer>` becomes `[answer]`, and `[SEP]`
    becomes `(SEP)`, so they stay harmless wherever the text is encoded again. The text is then encoded and decoded,
    because a tokenizer that normalizes its input can turn something else into a control token or a tag. Such an id is
    dropped, such a tag gets other brackets, and the result is checked again. A text that is not harmless after three
    passes becomes empty.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, protocol: TagProtocol | None = None) -> None:
        self._tokenizer = tokenizer
        self._protocol = protocol or TagProtocol()
        controls = control_tokens(tokenizer, self._protocol.tag_names)
        self._control_ids = frozenset(controls)
        # A control token without brackets cannot be rewritten: its id is dropped.
        rewritable = (token for token in controls.values() if token != token.translate(_OTHER_BRACKETS))
        # `(?!)` matches nothing. Longer strings first, or a control token would be taken for its prefix.
        strings = sorted(map(re.escape, rewritable), key=len, reverse=True)
        self._control_strings = re.compile("|".join(strings) or "(?!)")

    def sanitize(self, untrusted: str, max_tokens: int) -> SanitizedText:
        """The first `max_tokens` tokens of a text, sanitized.

        Only as much of the text is encoded as necessary, and `text` ends where encoding did. Tags and control tokens
        beyond that are still counted.
        """
        text, neutralized = self.rewrite(untrusted)
        is_cut = False
        for _ in range(_MAX_PASSES):
            beginning, ids = self._encode_beginning(text, max_tokens)
            is_cut |= len(beginning) < len(text)
            kept = [token_id for token_id in ids if token_id not in self._control_ids]
            read, remade = self.rewrite(decode(self._tokenizer, kept))
            made = len(ids) - len(kept) + remade
            if not made:
                truncated = is_cut or len(ids) > max_tokens
                return SanitizedText(beginning, tuple(ids[:max_tokens]), truncated, neutralized)
            text, neutralized = read, neutralized + made
        return SanitizedText("", (), True, neutralized)

    def clean(self, untrusted: str) -> str:
        """The whole text, sanitized."""
        return self.sanitize(untrusted, len(untrusted)).text

    def rewrite(self, untrusted: str) -> tuple[str, int]:
        """The text with other brackets around tags and control tokens, and how many there were. Nothing is encoded.

        Retrieved JSON may contain lone surrogates, which no tokenizer accepts; each becomes a question mark.
        """
        text, tags = self._protocol.neutralize(encodable(untrusted, "?"))
        text, controls = self._control_strings.subn(lambda token: token[0].translate(_OTHER_BRACKETS), text)
        return text, tags + controls

    def _encode_beginning(self, text: str, max_tokens: int) -> tuple[str, list[int]]:
        """A prefix of the text that is long enough for its first `max_tokens` tokens, and its ids."""
        size = _CHARACTERS_PER_TOKEN * (max_tokens + _MARGIN)
        while True:
            ids = self._tokenizer.encode(text[:size], add_special_tokens=False, verbose=False)
            if size >= len(text) or len(ids) >= max_tokens + _MARGIN:
                return text[:size], ids
            size *= 4


class ObservationEncoder:
    """Encodes observations of at most `max_tokens` tokens.

    The frame is trusted text and never cut. The body is untrusted, so it goes through a `Sanitizer`, and is cut if it
    is too long.

    Raises ValueError if `max_tokens` is too small for the frame.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, protocol: TagProtocol, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._protocol = protocol
        self._max_tokens = max_tokens
        self._sanitizer = Sanitizer(tokenizer, protocol)
        self._frame_ids = {frame: self._encode_frame(frame) for frame in protocol.frames}

    def reply(self, reply: Reply, after: Sequence[int] = ()) -> Observation:
        """Encode the environment's reply to a turn, which consists of the token ids `after`.

        Tool results may replace its text: the chat template then renders a message for each. A token that ends the
        turn and, in some templates, begins the next message, is not repeated.

        Raises ValueError for results, and for the role "user", if the policy's turns are not messages.
        """
        is_message = bool(reply.results) or reply.role == "user"
        if is_message and not isinstance(self._protocol, ChatProtocol):
            what = "results" if reply.results else "role='user'"
            raise ValueError(f"{what} needs turns that are messages: AgentRollout(…, protocol=ChatProtocol())")
        begun = after[-1:] if self._protocol.turns_are_messages else ()
        if reply.results:
            return self._of_tools(reply.results, begun)
        frame = self._protocol.message_frame if reply.role == "user" else self._protocol.information_frame
        return self._encode(frame, reply.text, reply.passages, reply.role, begun)

    def invalid_feedback(self, message_closed: bool) -> Observation:
        """Encode the corrective message; `message_closed` tells whether the policy ended its own message."""
        frame = self._protocol.message_frame if message_closed else self._protocol.feedback_frame
        return self._encode(frame, self._protocol.invalid_feedback)

    def greeted(self, prompt: Any, greeting: str | None) -> tuple[Any, int]:
        """A prompt, as text or messages, with what its environment says at its end, sanitized and cut.

        The user's own text stays as it is. Also returns how many control tokens and tags the addition contained.
        """
        if not greeting:
            return prompt, 0
        if isinstance(prompt, str):
            added, hits = self._added(prompt, greeting)
            return prompt + added, hits
        own = prompt[-1].get("content") or ""
        if isinstance(own, list):  # some templates write blocks without anything between them
            added, hits = self._added("".join(each.get("text") or "" for each in own), greeting)
            return [*prompt[:-1], {**prompt[-1], "content": [*own, {"type": "text", "text": added}]}], hits
        added, hits = self._added(own, greeting)
        return [*prompt[:-1], {**prompt[-1], "content": own + added}], hits

    def _added(self, before: str, text: str) -> tuple[str, int]:
        harmless = self._sanitizer.sanitize(text, self._max_tokens)
        kept = self._kept(harmless)
        # The end of the text before and the beginning of this one may form a tag.
        joined = max(self._sanitizer.rewrite(before + kept)[1] - self._sanitizer.rewrite(before)[1], 0)
        return kept.translate(_ROUND_BRACKETS) if joined else kept, harmless.neutralized + joined

    def _encode(
        self,
        frame: Frame,
        body: str,
        passages: tuple[Passage, ...] = (),
        role: str = "tool",
        begun: Sequence[int] = (),
    ) -> Observation:
        prefix_ids, suffix_ids = self._frame_ids[frame]
        harmless = self._sanitizer.sanitize(body, self._max_tokens - len(prefix_ids) - len(suffix_ids))
        ids = _without(begun, [*prefix_ids, *harmless.token_ids, *suffix_ids])
        text = decode(self._tokenizer, ids)
        return Observation(ids, text, passages, harmless.truncated, harmless.neutralized, role)

    def _of_tools(self, results: Sequence[ToolResult], begun: Sequence[int]) -> Observation:
        """The messages of tools. If they are too long together, the last ones are cut or left out."""
        assert isinstance(self._protocol, ChatProtocol)
        room = self._max_tokens
        while True:
            harmless = self._within(room, results)
            shown = tuple(
                each._replace(tool=self._sanitizer.clean(each.tool), text=self._kept(text))
                for each, text in zip(results, harmless, strict=False)
            )
            ids = _without(begun, self._protocol.result_ids(shown))
            if len(ids) <= self._max_tokens or room == 0:
                break
            room = max(room - (len(ids) - self._max_tokens), 0)  # for what the template adds
        truncated = len(shown) < len(results) or any(each.truncated for each in harmless)
        neutralized = sum(each.neutralized for each in harmless)
        text = decode(self._tokenizer, ids)
        return Observation(ids, text, (), truncated, neutralized, results=shown)

    def _within(self, room: int, results: Sequence[ToolResult]) -> list[SanitizedText]:
        """The sanitized texts of the results that fit into `room` tokens, the last one cut; of one at least."""
        harmless: list[SanitizedText] = []
        for each in results:
            if harmless and room <= 0:
                break
            harmless.append(self._sanitizer.sanitize(each.text, room))
            room -= len(harmless[-1].token_ids)
        return harmless

    def _kept(self, harmless: SanitizedText) -> str:
        return decode(self._tokenizer, harmless.token_ids) if harmless.truncated else harmless.text

    def _encode_frame(self, frame: Frame) -> tuple[list[int], list[int]]:
        prefix_ids, suffix_ids = (
            list(self._tokenizer.encode(text, add_special_tokens=False)) for text in (frame.prefix, frame.suffix)
        )
        size = len(prefix_ids) + len(suffix_ids)
        if size > self._max_tokens:
            raise ValueError(f"max_observation_tokens={self._max_tokens} must be at least {size}, the size of {frame}")
        return prefix_ids, suffix_ids


def _without(begun: Sequence[int], ids: Sequence[int]) -> tuple[int, ...]:
    """The ids of a message, except a first one with which the policy has ended its own."""
    return tuple(ids[1:] if begun and ids[:1] == [*begun] else ids)


def is_image(block: Any) -> bool:
    """Whether a content block is an image."""
    return isinstance(block, dict) and block.get("type") == "image" and "image" in block
