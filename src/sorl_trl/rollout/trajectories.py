"""Trajectories as tokens: their texts, their end, and the statistics logged under `rollout/`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from sorl_trl.types import ActionKind, Observation, StopReason, Trajectory, Turn

_LOOKS_LIKE_CONTROL = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_IN_HARDLY_ANY_VOCABULARY = "ᚠ 𓀀 ꙮ"


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The unmodified text of `token_ids`: special tokens are included, and spaces are not cleaned up."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def token_texts(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """What each token adds to the text; the pieces join to the text. A character belongs to its last token."""
    texts: list[str] = []
    first = 0  # the first token of a character that is not complete yet
    for last in range(len(token_ids)):
        # Decode after the previous token, because some tokenizers drop a space at the beginning of a text.
        before = token_ids[max(first - 1, 0) : first]
        text = decode(tokenizer, [*before, *token_ids[first : last + 1]])[len(decode(tokenizer, before)) :]
        is_whole = not text.endswith("\ufffd") or last == len(token_ids) - 1
        texts.append(text if is_whole else "")
        first = last + 1 if is_whole else first
    return texts


def control_tokens(tokenizer: PreTrainedTokenizerBase, tag_names: Iterable[str]) -> dict[int, str]:
    """The tokens, by id, that untrusted text must not become.

    These are special tokens, except one that stands for unknown words; added tokens such as `<|fim_prefix|>` and
    `[TOOL_RESULTS]`, which some tokenizers do not declare special; and opening and closing tags of `tag_names` that
    are one token.
    """
    controls = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special or _LOOKS_LIKE_CONTROL.fullmatch(token.content):
            controls[token_id] = token.content
    vocabulary = tokenizer.get_vocab()
    for tag in (f"<{slash}{name}>" for name in tag_names for slash in ("", "/")):
        if tag in vocabulary:
            controls[vocabulary[tag]] = tag
    if _stands_for_unknown_words(tokenizer):
        controls.pop(tokenizer.unk_token_id, None)
    return controls


def _stands_for_unknown_words(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether plain text can become the unknown token.

    In byte-level vocabularies, it cannot. They still name one, which is often the end-of-text token.
    """
    if tokenizer.unk_token_id in (None, tokenizer.eos_token_id, tokenizer.bos_token_id):
        return False
    return tokenizer.unk_token_id in tokenizer.encode(_IN_HARDLY_ANY_VOCABULARY, add_special_tokens=False)


# The policy, the environment, the agent or an infrastructure failure ended these; the others reached a length limit.
_COMPLETE = {
    StopReason.ANSWERED,
    StopReason.MAX_TURNS,
    StopReason.ENVIRONMENT_DONE,
    StopReason.AGENT_ERROR,
    StopReason.SEARCH_UNAVAILABLE,
    StopReason.ENVIRONMENT_UNAVAILABLE,
    StopReason.NO_CALL,
}


def closed(trajectories: Sequence[Trajectory], eos_token_id: int, window: int | None = None) -> list[Trajectory]:
    """Trajectories as they are trained on. Their columns include the trajectory itself and, if any is named, agents.

    A complete trajectory ends in an end-of-sequence token, so that TRL's truncation metrics and
    `mask_truncated_completions` reflect only length limits, unless its context fills the `window`. If the policy did
    not write the token, it is an observation, and without a turn the whole completion. A prompt that was too long to
    be read is cut to the longest that was read, because it would lengthen every row of a batch.
    """
    longest = max((len(each.prompt_ids) for each in trajectories if each.segments), default=1)
    are_named = any(turn.agent for each in trajectories for turn in each.turns)
    made = []
    for each in trajectories:
        agents = {"agents": each.agents} if are_named else {}
        prompt_ids = each.prompt_ids if each.segments else each.prompt_ids[:longest]
        segments = _closed(each, eos_token_id, window)
        columns = {"trajectory": each, **each.columns, **agents}
        made.append(replace(each, prompt_ids=prompt_ids, segments=segments, columns=columns))
    return made


def _closed(trajectory: Trajectory, eos_token_id: int, window: int | None) -> tuple[Turn | Observation, ...]:
    segments = trajectory.segments
    context = segments[-1].context if segments else 0
    read = sum(len(each.token_ids) for each in segments if each.context == context)
    read += 0 if context else len(trajectory.prompt_ids)
    is_cut = trajectory.stop_reason not in _COMPLETE or (window is not None and read >= window)
    if segments and (is_cut or segments[-1].token_ids[-1:] == (eos_token_id,)):
        return segments
    return *segments, Observation((eos_token_id,), "", context=context)


def rollout_statistics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute means and shares over a batch. The keys are always the same; a mean over nothing is 0.

    A search counts only if it was answered, so not in the last turn, and not while the engine is down.
    """
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    observations = [each for trajectory in trajectories for each in trajectory.observations]
    searches = [search for trajectory in trajectories for search in _answered_searches(trajectory)]
    found = [len(observation.passages) for _, observation in searches]
    per_trajectory = len(trajectories)
    contexts = [{0, *(segment.context for segment in each.segments)} for each in trajectories]
    statistics = {
        "turns_per_trajectory": _ratio(len(turns), per_trajectory),
        "contexts_per_trajectory": _ratio(sum(map(len, contexts)), per_trajectory),
        "searches_per_trajectory": _ratio(len(searches), per_trajectory),
        "tool_calls_per_trajectory": _ratio(sum(map(_calls_of_tools, trajectories)), per_trajectory),
        "invalid_actions_per_trajectory": _ratio(
            sum(turn.action.kind is ActionKind.INVALID for turn in turns), per_trajectory
        ),
        "neutralized_per_trajectory": _ratio(sum(seen.neutralized for seen in observations), per_trajectory),
        "masked_share": _ratio(sum(t.stop_reason.is_infrastructure_failure for t in trajectories), per_trajectory),
        "tokens_per_turn": _ratio(sum(len(turn.token_ids) for turn in turns), len(turns)),
        "tokens_per_observation": _ratio(sum(len(seen.token_ids) for seen in observations), len(observations)),
        "truncated_observation_share": _ratio(sum(seen.truncated for seen in observations), len(observations)),
        "unique_query_share": _ratio(len({turn.action.content for turn, _ in searches}), len(searches)),
        "passages_per_search": _ratio(sum(found), len(searches)),
        "empty_search_share": _ratio(found.count(0), len(searches)),
    }
    reasons = Counter(trajectory.stop_reason for trajectory in trajectories)
    return statistics | {f"stop_reason/{r.value}": _ratio(reasons[r], per_trajectory) for r in StopReason}


def tool_statistics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """TRL's metrics of tools: answered calls per trajectory, and the share of them that failed."""
    results = [result for each in trajectories for seen in each.observations for result in seen.results]
    failed = sum(result.failed for result in results)
    calls = _ratio(len(results), len(trajectories))
    return {"tools/call_frequency": calls, "tools/failure_frequency": _ratio(failed, len(results))}


def _answered_searches(trajectory: Trajectory) -> list[tuple[Turn, Observation]]:
    return [
        (turn, reply)
        for turn, reply in zip(trajectory.turns, trajectory.replies, strict=True)
        if reply is not None and turn.action.kind is ActionKind.SEARCH
    ]


def _calls_of_tools(trajectory: Trajectory) -> int:
    """Calls in tags other than a search, and answered calls in messages (a message may make several)."""
    in_tags = sum(turn.action.kind is ActionKind.TOOL for turn in trajectory.turns)
    return in_tags + sum(len(observation.results) for observation in trajectory.observations)


def _ratio(total: float, count: float) -> float:
    return total / count if count else 0.0
