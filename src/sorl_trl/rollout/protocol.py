"""How the policy's text expresses actions and how the environment's text is written: in tags, or as chat messages.

With a `TagProtocol`, the policy writes `<think>…</think>`, then either `<search>query</search>` or
`<answer>…</answer>`; the environment answers a search with `<information>…</information>`. The tags are those of
Search-R1 (arXiv 2503.09516). They work for base and chat models, because observations continue the policy's own text.
With a `ChatProtocol`, each turn and each reply is a message of the chat template.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from sorl_trl.rollout.trajectories import control_tokens, decode
from sorl_trl.text import nests
from sorl_trl.types import Action, ActionKind, Passage, ToolCall, ToolResult

logger = logging.getLogger(__name__)

LEVELS = 64
"""How deep a call may nest, so that whatever walks over its arguments reaches their end. Our choice."""
PROTOCOL_TAGS = ("think", "search", "information", "answer", "tool_call", "tool_response")
"""Names that must not appear as tags in the environment's text: this package's, and those of chat models' tool calls.

`TagProtocol.tag_names` adds the names of a protocol's tools."""

_TAG_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_ANSWER = "answer"
_NO_TOOLS = (_ANSWER, "think", "information")
_SEARCH_FEEDBACK = (
    "My previous action is invalid. If I want to search, I should put the query between the search tags. "
    "If I want to give the final answer, I should put it between the answer tags. Let me try again."
)
_TOOLS_FEEDBACK = (
    "My previous action is invalid. If I want to use a tool, I should put its input between the tags of that tool: "
    "{tools}. If I want to give the final answer, I should put it between the answer tags. Let me try again."
)
_REPLY = "first-message-of-the-assistant"
_EXCHANGE = ({"role": "user", "content": "question"}, {"role": "assistant", "content": _REPLY})


@dataclass(frozen=True)
class Frame:
    """Trusted text around the body of an observation. It is never cut, and may contain real tags."""

    prefix: str = ""
    suffix: str = ""


@dataclass(frozen=True)
class TagProtocol:
    """How policy and environment communicate. The defaults are Search-R1's, except that no message spells out a tag.

    Search-R1's corrective message contains `<answer> and </answer>`, which a scorer that reads the completion as text
    would take for an answer.

    Raises ValueError for tool names that cannot be tags.
    """

    passage_template: str = "Doc {i}(Title: {title}) {text}\n"
    """How one passage is written; `i` counts from 1."""
    no_results: str = "No results found."
    search_failed: str = "The search failed for this query. Another query may work."
    invalid_feedback: str = _SEARCH_FEEDBACK
    """The reply to a turn that cannot be parsed. With tools other than a search, the default names them."""
    information_frame: Frame = field(default=Frame("\n\n<information>", "</information>\n\n"))
    """The text around passages, or around `no_results` or `search_failed`."""
    feedback_frame: Frame = field(default=Frame("\n", "\n"))
    """The text around `invalid_feedback` if the policy's own text continues."""
    message_frame: Frame = field(default=Frame("\n", "\n"))
    """The text around it after an end-of-sequence token. For a chat model, use `chat_message_frame(tokenizer)`."""

    tools: tuple[str, ...] = ("search",)
    """The tags with which the policy acts. `<search>` is a search; any other name is a tool of the environment."""

    turns_are_messages: ClassVar[bool] = False
    """Whether a turn is a whole message, so that a user can answer it."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The closing tags; each ends a turn."""
        return tuple(f"</{name}>" for name in (*self.tools, _ANSWER))

    @property
    def tag_names(self) -> tuple[str, ...]:
        """Names that must not appear as tags in the environment's text: `PROTOCOL_TAGS` and the tools."""
        return (*PROTOCOL_TAGS, *(name for name in self.tools if name not in PROTOCOL_TAGS))

    def __post_init__(self) -> None:
        if isinstance(self.tools, str):
            raise ValueError(f"tools={self.tools!r} is a string, but must be a tuple of names, such as ('search',)")
        for name in self.tools:
            if not _TAG_NAME.fullmatch(name) or name in _NO_TOOLS:
                rule = f"a tool's tag is a name, and none of {_NO_TOOLS}"
                raise ValueError(f"tools={self.tools!r} holds {name!r}: {rule}")
        if self.invalid_feedback == _SEARCH_FEEDBACK and self.tools not in ((), (ActionKind.SEARCH.value,)):
            object.__setattr__(self, "invalid_feedback", _TOOLS_FEEDBACK.format(tools=", ".join(self.tools)))

    @property
    def frames(self) -> tuple[Frame, ...]:
        return (self.information_frame, self.feedback_frame, self.message_frame)

    def in_chat(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None
    ) -> TagProtocol:
        """The protocol for prompts that are messages: replies to the policy are messages of the chat template.

        A custom `message_frame` is kept, unless it is empty. Raises the errors of `chat_message_frame`.
        """
        if self.message_frame not in (TagProtocol().message_frame, Frame("", "")):
            return self
        return replace(self, message_frame=chat_message_frame(tokenizer, template_kwargs))

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise ValueError if `tokenizer` cannot encode an action tag, because the policy could never act."""
        for name in (*self.tools, _ANSWER):
            for tag in (f"<{name}>", f"</{name}>"):
                ids = tokenizer.encode(tag, add_special_tokens=False)
                written = decode(tokenizer, ids)
                if tag not in written:
                    raise ValueError(f"tokenizer writes {tag!r} as {written!r}: it must be able to write the tag")

    def parse(self, text: str) -> Action:
        """Read the action of a turn from its first closing tag; text after that tag is ignored.

        The content is the text between the last matching opening tag and the closing tag. The action is invalid
        without a closing tag, without an opening tag, or with nothing between them.

        This rule alone defines an answer. The first tag decides, because the collector ends a turn there and never
        sees all of `<answer>A</answer> no: <answer>B</answer>`. If answers could be revised, naming several would pay.
        """
        closing = re.search("|".join(map(re.escape, self.stop_strings)), text)
        if closing is None:
            return Action(ActionKind.INVALID)
        name = closing[0][len("</") : -len(">")]
        _, opening, content = text[: closing.start()].rpartition(f"<{name}>")
        content = content.strip()
        if not opening or not content:
            return Action(ActionKind.INVALID)
        if name in (ActionKind.SEARCH, ActionKind.ANSWER):
            return Action(ActionKind(name), content)
        return Action(ActionKind.TOOL, content, name)

    def render_passages(self, passages: Sequence[Passage]) -> str:
        """The body of an observation: the passages, best first, or `no_results`."""
        if not passages:
            return self.no_results
        rendered = (
            self.passage_template.format(i=i, title=passage.title, text=passage.text)
            for i, passage in enumerate(passages, start=1)
        )
        return "".join(rendered).strip()

    def neutralize(self, text: str) -> tuple[str, int]:
        """Put each of the protocol's tags into square brackets, and return the text and how many there were.

        Unlike deleting, replacing cannot join the two halves of another tag.
        """
        in_brackets = _any_tag(self.tag_names).subn
        return in_brackets(lambda tag: f"[{'/' if tag['slash'] else ''}{tag['name']}]", text)


@cache
def _any_tag(names: tuple[str, ...]) -> re.Pattern[str]:
    either = "|".join(map(re.escape, names))
    return re.compile(rf"<\s*(?P<slash>/\s*)?(?P<name>{either})\s*(?:/\s*)?>", re.IGNORECASE)


@dataclass(frozen=True)
class ChatProtocol(TagProtocol):
    """Each turn is a message that the policy ends and the environment interprets.

    A reply is a message of the chat template, from a tool or from the user (`Reply.role`). Templates without tools
    show a tool's message as the user's. Prompts must be messages.

    With `functions`, calls are parsed as TRL parses those of its own tools, with the tokenizer's `response_template`.
    Text that cannot be parsed is not a call.
    """

    tools: tuple[str, ...] = ()
    functions: tuple[dict[str, Any], ...] = field(default=(), hash=False)
    """JSON schemas of the tools that the chat template shows. A `ToolBox` adds its own."""
    tokenizer: PreTrainedTokenizerBase | None = field(default=None, repr=False, compare=False)
    """The policy's tokenizer."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """What the chat template is rendered with."""

    turns_are_messages: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.tools:
            raise ValueError(f"tools={self.tools!r} must be empty: the environment reads whole messages")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Empty, because an end-of-sequence token ends a turn."""
        return ()

    @cached_property
    def message_ends(self) -> tuple[str, ...]:
        """The special tokens, of which one ends a message. The longest come first, because one may end in another."""
        assert self.tokenizer is not None
        added = (token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special)
        return tuple(sorted({*self.tokenizer.all_special_tokens, *added}, key=lambda token: (-len(token), token)))

    def in_chat(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None
    ) -> ChatProtocol:
        """The protocol with the messages of a chat template. Custom frames are kept.

        Raises the errors of `chat_message_frame`.
        """
        plain, user = TagProtocol(), chat_message_frame(tokenizer, template_kwargs)
        tool = _tool_frame(tokenizer, template_kwargs) or user
        return replace(
            self,
            information_frame=tool if self.information_frame == plain.information_frame else self.information_frame,
            message_frame=user if self.message_frame == plain.message_frame else self.message_frame,
            tokenizer=tokenizer,
            template_kwargs=dict(template_kwargs or {}),
        )

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise ValueError if prompts are plain text, or if `functions` are given without a way to parse calls."""
        if self.tokenizer is None:
            raise ValueError("`ChatProtocol` needs prompts that are messages, such as [{'role': 'user', …}]")
        if self.functions and getattr(tokenizer, "response_template", None) is None:
            raise ValueError(
                "the tokenizer has no `response_template` to parse tool calls with: set one, for example with "
                "`trl.chat_template_utils.add_response_schema(tokenizer)`"
            )

    def parse(self, text: str) -> Action:
        """The whole message, without the tokens that end it, and its calls."""
        calls = self._calls(text) if self.functions else ()
        while end := next(filter(text.endswith, self.message_ends), ""):
            text = text.removesuffix(end)
        return Action(ActionKind.MESSAGE, text.strip(), calls=calls)

    def result_ids(self, results: Sequence[ToolResult]) -> list[int]:
        """What the policy reads of tool results: all that the template writes between the policy's call and next turn.

        The call before them is a stand-in with the name of the first tool, which some templates show in its result.

        Raises ValueError if the template shows the call differently once results follow it.
        """
        tokenizer: Any = self.tokenizer

        def rendered(messages: list[Any], **options: Any) -> list[int]:
            options |= {"tokenize": True, "return_dict": False, **self.template_kwargs}
            return [*tokenizer.apply_chat_template(messages, **options)]

        call = {"type": "function", "function": {"name": results[0].tool, "arguments": {}}}
        called: list[Any] = [_EXCHANGE[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
        answers = [{"role": "tool", "name": each.tool, "content": each.text} for each in results]
        before, ids = rendered(called), rendered([*called, *answers], add_generation_prompt=True)
        ends = {*tokenizer.convert_tokens_to_ids([*self.message_ends])}
        last = max((place for place, each in enumerate(before) if each in ends), default=-1)
        if not decode(tokenizer, before[last + 1 :]).strip():
            before = before[: last + 1]  # the policy samples the token that ends its message, and nothing after it
        if ids[: len(before)] != before:
            raise ValueError("the chat template must show a call in the same way before and after its results")
        return ids[len(before) :]

    def _calls(self, text: str) -> tuple[ToolCall, ...]:
        assert self.tokenizer is not None
        begun = self.message_frame.suffix  # it may begin the message, with an opening tag of its thoughts
        try:
            message = MessageReader(self.tokenizer).parse_response(text, prefix=begun, tools=[*self.functions])
        except ValueError:
            return ()
        read = ((each["name"], each.get("arguments")) for each in calls_in(message) or ())
        return tuple(ToolCall(name, {} if arguments is None else arguments) for name, arguments in read)


def calls_in(message: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The functions that a parsed message calls; None if it holds anything else in their place."""
    given = message.get("tool_calls") or ()
    if not isinstance(given, list | tuple):
        return None
    calls = [call.get("function", call) if isinstance(call, dict) else call for call in given]
    return calls if all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls) else None


class MessageReader:
    """A tokenizer whose `parse_response` raises ValueError for any message that it cannot read, and no other error.

    TRL takes such a message for text without calls. Other errors, such as a RecursionError, would end the run.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def parse_response(self, response: Any, **options: Any) -> dict[str, Any]:
        """The message as a dictionary. Raises ValueError also if it nests too deeply to be walked."""
        try:
            message: dict[str, Any] = self._tokenizer.parse_response(response, **options)
        except Exception as error:  # a parser may raise anything
            if not isinstance(error, ValueError | TypeError | RecursionError):  # those of a malformed call
                _warn_of_parser(type(error).__name__)
            raise ValueError(f"the message cannot be parsed: {error!r}") from error
        if nests(message, LEVELS):
            raise ValueError(f"the message nests in more than {LEVELS} levels")
        return message

    def __getattr__(self, name: str) -> Any:
        if name == "_tokenizer":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._tokenizer(*args, **options)

    def __len__(self) -> int:
        return len(self._tokenizer)


@cache
def _warn_of_parser(error: str) -> None:
    logger.warning("`tokenizer.response_template` raises %s: turns that it cannot parse stay text.", error)


def message_end(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None) -> str | None:
    """The control token that ends the assistant's last message in the chat template; None if there is none."""
    options: Any = dict(template_kwargs or {})
    text = str(tokenizer.apply_chat_template([*_EXCHANGE], tokenize=False, **options))
    return _first_control(tokenizer, text.partition(_REPLY)[2])


def endless_messages(
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: Sequence[int],
    template_kwargs: Mapping[str, Any] | None = None,
) -> str | None:
    """A warning if none of `eos_token_ids` ends the chat template's messages, so that generation would continue."""
    try:
        end = message_end(tokenizer, template_kwargs)
    except Exception:  # a template may raise anything
        return None
    if end is None or (end_id := tokenizer.get_vocab()[end]) in eos_token_ids:
        return None
    ends = ", ".join(repr(tokenizer.convert_ids_to_tokens(each)) for each in eos_token_ids)
    return (
        f"The chat template ends messages with {end!r}, but generation stops only at {ends}: it would continue past "
        f"the end of a message up to the turn's limit. Set `tokenizer.eos_token = {end!r}`, or add {end_id} to "
        "`model.generation_config.eos_token_id`."
    )


def chat_message_frame(
    tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None, role: str = "user"
) -> Frame:
    """The text that the chat template puts around a message between two assistant messages.

    `role` is the role of the message, "user" or "tool". `template_kwargs` are passed to the template, as the trainer's
    `chat_template_kwargs` are for prompts.

    The frame excludes the token that ends the assistant's message, because the policy samples it. That token need not
    be the tokenizer's end-of-sequence token: Gemma's messages end differently.

    Raises ValueError if the template does not render both messages.
    """
    answer = 'second "message"\nof another'  # a template that writes JSON changes the quotes
    options: Any = dict(template_kwargs or {})
    end = message_end(tokenizer, template_kwargs)
    messages = [*_EXCHANGE, {"role": role, "content": answer}]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))
    between, shown, suffix = text.partition(_REPLY)[2].partition(answer)
    if not shown:
        raise ValueError(
            f"the chat template renders {text!r}, but must render the assistant's and then the {role}'s message"
        )
    if end is not None and end not in between:  # GPT-OSS ends the last message otherwise than those before it
        end = _first_control(tokenizer, between)
    _, ended, after_end = between.partition(end or str(tokenizer.eos_token))
    return Frame(after_end if ended else between, suffix)


def _first_control(tokenizer: PreTrainedTokenizerBase, text: str) -> str | None:
    """The control token that comes first in `text`; of several at the same place, the longest."""
    controls = control_tokens(tokenizer, ()).values()
    found = [(text.index(token), -len(token), token) for token in controls if token in text]
    return min(found)[2] if found else None


def _tool_frame(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None) -> Frame | None:
    """The text around a tool's message; None if the template renders no such message, or only after a call."""
    try:
        return chat_message_frame(tokenizer, template_kwargs, "tool")
    except Exception:  # a template may raise anything
        return None
