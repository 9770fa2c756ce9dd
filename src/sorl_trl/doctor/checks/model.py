"""The tokenizer and the model's configuration: what the policy can write, and how it is spoken to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from sorl_trl.command_line import UserMistake, check_checkpoint
from sorl_trl.doctor.findings import Finding
from sorl_trl.doctor.subject import Subject, given
from sorl_trl.recipe.build import resume_problems
from sorl_trl.rollout import PROTOCOLS, chat_message_frame
from sorl_trl.text import one_line
from sorl_trl.trainers.checks.training_noise import noise_in_config

FOLLOWERS = ("\n", "\n\n", " ", ".")
"""What a policy may well write behind a closing tag."""


def check_model(subject: Subject) -> Iterator[Finding]:
    """Loads the tokenizer and the model's configuration, never its weights."""
    raw, line = subject.raw, subject.recipe.line("model_name_or_path")
    # Training looks for it once the model is loaded.
    yield from map(subject.recipe.finding, resume_problems(raw.resume_from_checkpoint))
    if not raw.model_name_or_path:
        yield Finding("error", "`model_name_or_path` is missing", line)
        return
    options = {"revision": raw.model_revision, "trust_remote_code": raw.trust_remote_code}
    try:
        check_checkpoint(raw.model_name_or_path)
    except UserMistake as error:
        yield Finding("error", str(error), line)
        return
    try:
        config: Any = AutoConfig.from_pretrained(raw.model_name_or_path, **options)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(raw.model_name_or_path, **options)
    except Exception as error:  # transformers has no common error for what may be wrong in somebody's files
        yield Finding("error", f"{raw.model_name_or_path} cannot be loaded: {one_line(error)}", line)
        return
    subject.tokenizer, text_config = tokenizer, config.get_text_config()
    subject.positions = getattr(text_config, "max_position_embeddings", None)
    subject.config_noise = noise_in_config(text_config)
    if tokenizer.eos_token_id is None:
        yield Finding("error", "the tokenizer has no end-of-sequence token, in which every trajectory must end", line)
    if len(tokenizer) > text_config.vocab_size:
        what = (
            f"the tokenizer knows {len(tokenizer)} tokens, but the model has embeddings for {text_config.vocab_size}"
        )
        yield Finding("error", what, line)
    padding = (
        "" if tokenizer.pad_token_id is not None else ", no padding token (TRL takes the one that ends sequences)"
    )
    yield Finding("ok", f"{config.model_type}, {len(tokenizer)} tokens{padding}, {subject.positions} positions")


def check_tags(subject: Subject) -> Iterator[Finding]:
    """Whether the policy can write the protocol's tags."""
    tokenizer = given(subject.tokenizer, "the tokenizer")
    protocol = PROTOCOLS[subject.rollout.protocol]
    try:
        protocol.check(tokenizer)
    except ValueError as error:
        yield Finding("error", str(error), subject.recipe.line("model_name_or_path"))
        return
    tags = [*protocol.stop_strings, *(stop.replace("/", "") for stop in protocol.stop_strings)]
    sizes = ", ".join(f"{tag} {len(_encode(tokenizer, tag))}" for tag in tags)
    yield Finding("ok", f"tokens per tag: {sizes}{_overhang(tokenizer, protocol.stop_strings)}")


def _overhang(tokenizer: PreTrainedTokenizerBase, stop_strings: tuple[str, ...]) -> str:
    """A note on tokens that reach beyond a stop string: harmless here, and surprising in a transcript."""
    reaching = [
        follower
        for follower in FOLLOWERS
        for stop in stop_strings
        if _encode(tokenizer, stop + follower)[: len(ids := _encode(tokenizer, stop))] != ids
    ]
    if not reaching:
        return ""
    shown = ", ".join(map(repr, dict.fromkeys(reaching)))
    return f"; the last may reach into {shown} behind the tag: the turn then ends with it, and it is not read"


def check_chat(subject: Subject) -> Iterator[Finding]:
    """Whether the chat template can be spoken through turn by turn."""
    if not subject.rollout.chat:
        yield Finding("ok", "`chat` is false: prompts are plain text")
        return
    tokenizer = given(subject.tokenizer, "the tokenizer")
    line = subject.recipe.line("chat", False)
    subject.chat_template_works = False
    if not getattr(tokenizer, "chat_template", None):
        yield Finding("error", "`chat` is true, but the tokenizer has no chat template", line)
        return
    try:
        frame = chat_message_frame(tokenizer, subject.chat_template_kwargs)
        preserves = _preserves_prefixes(tokenizer, subject.chat_template_kwargs)
    except Exception as error:  # a template is a program of somebody else's
        yield Finding("error", f"the chat template cannot show a conversation: {one_line(error)}", line)
        return
    subject.chat_template_works = True
    if not preserves:
        what = "the chat template renders earlier messages otherwise once others follow: training keeps what was "
        what += "sampled, but whoever renders the conversation anew shows the policy another text"
        yield Finding("warning", what, line)
    yield Finding("ok", f"feedback after a message is framed by {frame.prefix!r} and {frame.suffix!r}")


def _preserves_prefixes(tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> bool:
    said = "<think>why</think> answer-of-the-assistant"
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": said}]
    after = [*messages, {"role": "user", "content": "next question"}]
    prompt = str(tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True, **options))
    shown, shown_later = (
        str(tokenizer.apply_chat_template(each, tokenize=False, **options)) for each in (messages, after)
    )
    return all(text.startswith(prompt + said) for text in (shown, shown_later))


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))
