"""Observation text to token ids, such that what was retrieved can neither control the policy nor act for it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from sorl_trl.rollout.protocol import PROTOCOL_TAGS, Frame, TagProtocol
from sorl_trl.rollout.tokens import control_tokens, decode
from sorl_trl.types import Observation, Passage

_MAX_PASSES = 3


class ObservationEncoder:
    """Encodes observations of at most `max_tokens` tokens.

    The frame is trusted text. The body is not, whoever wrote it: tags are neutralized, control tokens are encoded as
    plain text, and an id that is a control token even so is dropped. Too long a body is cut; the frame is not.

    Raises ValueError if `max_tokens` is less than the frame takes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, protocol: TagProtocol, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._protocol = protocol
        self._max_tokens = max_tokens
        controls = control_tokens(tokenizer, PROTOCOL_TAGS)
        self._control_ids = frozenset(controls)
        # `(?!)` matches nothing. Longer strings first, or a control token would be taken for its prefix.
        strings = sorted(map(re.escape, controls.values()), key=len, reverse=True)
        self._control_strings = re.compile("|".join(strings) or "(?!)")
        self._frame_ids = {frame: self._encode_frame(frame) for frame in protocol.frames}

    def passages(self, passages: Sequence[Passage]) -> Observation:
        """What a search found, which may be nothing."""
        body = self._protocol.render_passages(passages)
        return self._encode(self._protocol.information_frame, body, tuple(passages))

    def search_failed(self) -> Observation:
        """In place of passages: this query cannot be searched for."""
        return self._encode(self._protocol.information_frame, self._protocol.search_failed)

    def invalid_feedback(self, message_closed: bool) -> Observation:
        """The corrective message. `message_closed`: the policy ended its message with an end-of-sequence token."""
        frame = self._protocol.message_frame if message_closed else self._protocol.feedback_frame
        return self._encode(frame, self._protocol.invalid_feedback)

    def _encode(self, frame: Frame, body: str, passages: tuple[Passage, ...] = ()) -> Observation:
        prefix_ids, suffix_ids = self._frame_ids[frame]
        body_ids, neutralized = self._encode_body(body)
        room = self._max_tokens - len(prefix_ids) - len(suffix_ids)
        token_ids = (*prefix_ids, *body_ids[:room], *suffix_ids)
        return Observation(token_ids, decode(self._tokenizer, token_ids), passages, len(body_ids) > room, neutralized)

    def _encode_frame(self, frame: Frame) -> tuple[list[int], list[int]]:
        prefix_ids, suffix_ids = (
            list(self._tokenizer.encode(text, add_special_tokens=False)) for text in (frame.prefix, frame.suffix)
        )
        size = len(prefix_ids) + len(suffix_ids)
        if size > self._max_tokens:
            raise ValueError(f"max_observation_tokens={self._max_tokens} must be at least {size}, the size of {frame}")
        return prefix_ids, suffix_ids

    def _encode_body(self, body: str) -> tuple[list[int], int]:
        """Ids of the body, uncut, and how many tags and control tokens were made harmless in it."""
        # Retrieved JSON may hold lone surrogates, which no tokenizer takes.
        text, neutralized = self._protocol.neutralize(body.encode("utf-8", "replace").decode("utf-8"))
        for _ in range(_MAX_PASSES):
            ids, controls = self._encode_untrusted(text)
            # A tokenizer that normalizes its input, or an id dropped between two halves, can make a tag anew.
            text, remade = self._protocol.neutralize(decode(self._tokenizer, ids))
            neutralized += controls + remade
            if not remade:
                return ids, neutralized
        return [], neutralized

    def _encode_untrusted(self, text: str) -> tuple[list[int], int]:
        """Ids of `text` without any control id, and how many control tokens it spelled out."""
        ids = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        kept = [token_id for token_id in ids if token_id not in self._control_ids]
        # Most spellings are split into plain tokens; of those that are not, each is dropped, and counted once.
        return kept, max(len(ids) - len(kept), len(self._control_strings.findall(text)))
