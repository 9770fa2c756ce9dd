"""Observation text to token ids: a frame that is trusted around a body that is not."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from sorl_trl.rollout.protocol import Frame, TagProtocol
from sorl_trl.rollout.sanitize import Sanitizer
from sorl_trl.rollout.tokens import decode
from sorl_trl.types import Observation, Passage


class ObservationEncoder:
    """Encodes observations of at most `max_tokens` tokens.

    The frame is trusted text. The body is not, whoever wrote it: see `Sanitizer`. Too long a body is cut; the frame is
    not.

    Raises ValueError if `max_tokens` is less than the frame takes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, protocol: TagProtocol, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._protocol = protocol
        self._max_tokens = max_tokens
        self._sanitizer = Sanitizer(tokenizer, protocol)
        self._frame_ids = {frame: self._encode_frame(frame) for frame in protocol.frames}

    def passages(self, passages: Sequence[Passage]) -> Observation:
        """Encode what a search found, which may be nothing."""
        return self.information(self._protocol.render_passages(passages), passages)

    def information(self, text: str, passages: Sequence[Passage] = ()) -> Observation:
        """Encode what the environment says to a turn; `passages` are those that `text` shows, if it shows any."""
        return self._encode(self._protocol.information_frame, text, tuple(passages))

    def invalid_feedback(self, message_closed: bool) -> Observation:
        """Encode the corrective message; `message_closed` says that the policy ended its own by an end of sequence."""
        frame = self._protocol.message_frame if message_closed else self._protocol.feedback_frame
        return self._encode(frame, self._protocol.invalid_feedback)

    def check_messages_fit(self) -> None:
        """Raise ValueError if a message of the protocol's own would be cut."""
        messages = {
            "no_results": self.information(self._protocol.no_results),
            "search_failed": self.information(self._protocol.search_failed),
            "invalid_feedback": self.invalid_feedback(message_closed=False),
            "invalid_feedback, as a message": self.invalid_feedback(message_closed=True),
        }
        if cut := [name for name, message in messages.items() if message.truncated]:
            raise ValueError(
                f"max_observation_tokens={self._max_tokens} would cut {cut} of the protocol: give more tokens or "
                "shorter messages"
            )

    def _encode(self, frame: Frame, body: str, passages: tuple[Passage, ...] = ()) -> Observation:
        prefix_ids, suffix_ids = self._frame_ids[frame]
        harmless = self._sanitizer.sanitize(body, self._max_tokens - len(prefix_ids) - len(suffix_ids))
        token_ids = (*prefix_ids, *harmless.token_ids, *suffix_ids)
        text = decode(self._tokenizer, token_ids)
        return Observation(token_ids, text, passages, harmless.truncated, harmless.neutralized)

    def _encode_frame(self, frame: Frame) -> tuple[list[int], list[int]]:
        prefix_ids, suffix_ids = (
            list(self._tokenizer.encode(text, add_special_tokens=False)) for text in (frame.prefix, frame.suffix)
        )
        size = len(prefix_ids) + len(suffix_ids)
        if size > self._max_tokens:
            raise ValueError(f"max_observation_tokens={self._max_tokens} must be at least {size}, the size of {frame}")
        return prefix_ids, suffix_ids
