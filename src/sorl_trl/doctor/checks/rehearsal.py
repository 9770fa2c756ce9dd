"""A rollout for two questions in which a script takes the policy's part: does what should be trained on arrive?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from transformers import PreTrainedTokenizerBase

from sorl_trl import qa
from sorl_trl.doctor.checks.questions import prompts_of
from sorl_trl.doctor.findings import Finding
from sorl_trl.doctor.subject import Subject, given
from sorl_trl.qa import Question
from sorl_trl.rollout import Collector, Generation, ObservationEncoder
from sorl_trl.rollout.tokens import decode
from sorl_trl.trainers.agents.agent_rollout import rollout_output
from sorl_trl.types import ActionKind, Passage, StopReason, Trajectory

REHEARSED = 2
QUERY_WORDS = 3


class _Script:
    """A `Generator` for one row: the turns in order, the last again and again, each cut to its budget."""

    def __init__(self, turns: Sequence[Sequence[int]]) -> None:
        self._turns = chain(turns, repeat(turns[-1]))

    def generate(self, contexts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> list[Generation]:
        turn = next(self._turns)
        said = tuple(turn[: max_new_tokens[0]])
        return [Generation(said, None, stopped=len(said) == len(turn))]


@dataclass(frozen=True)
class _Found:
    """A `SearchBackend` that finds one passage, which says the answer."""

    answer: str

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        return [[Passage("0", "", self.answer)] for _ in queries]


@dataclass(frozen=True)
class _Rehearsed:
    """What was to be said for a question, and what became of it."""

    question: Question
    texts: list[str]
    turns: list[list[int]]
    trajectory: Trajectory


def check_rehearsal(subject: Subject) -> Iterator[Finding]:
    """Collects, assembles and rewards a search and the right answer for each of two questions."""
    tokenizer = given(subject.tokenizer, "the tokenizer")
    if tokenizer.eos_token_id is None:
        given(None, "an end-of-sequence token")
    questions = _rewardable(subject)
    prompts = prompts_of(subject, questions)
    try:
        rehearsed = [
            _rehearse(subject, tokenizer, question, prompt)
            for question, prompt in zip(questions, prompts, strict=True)
        ]
    except ValueError as error:  # the collector refuses tokenizer, protocol or limits
        yield Finding("error", str(error), subject.recipe.line_in(str(error), {*vars(subject.raw)}))
        return
    problem = next(filter(None, (_problem(subject, each) for each in rehearsed)), None)
    if problem:
        yield problem
        return
    trajectories = [each.trajectory for each in rehearsed]
    yield from _check_loss_mask(trajectories, tokenizer)
    yield from _check_rewards(subject, [each.question for each in rehearsed], trajectories)
    yield from _check_observations(subject, tokenizer)


def _rewardable(subject: Subject) -> list[Question]:
    """The first questions that every reward can score."""
    questions = given(subject.questions, "questions")
    if "choice" in subject.raw.rewards:
        questions = [question for question in questions if question.options]
    return given(questions[:REHEARSED] or None, "a question with options")


def _rehearse(
    subject: Subject, tokenizer: PreTrainedTokenizerBase, question: Question, prompt: Sequence[int]
) -> _Rehearsed:
    rollout, answer = subject.rollout, min(question.golden_answers, key=len)
    query = " ".join(question.question.split()[:QUERY_WORDS])
    texts = [f"<search> {query} </search>"] * bool(rollout.max_turns) + [f"<answer> {answer} </answer>"]
    turns = [list(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    limits = rollout.limits(subject.max_completion_length)
    collector = Collector(
        tokenizer, _Found(answer), rollout.tag_protocol(tokenizer, subject.chat_template_kwargs), limits
    )
    return _Rehearsed(question, texts, turns, collector.collect([prompt], _Script(turns))[0])


def _problem(subject: Subject, rehearsed: _Rehearsed) -> Finding | None:
    """Why the trajectory is not what was to be said."""
    trajectory, recipe, raw = rehearsed.trajectory, subject.recipe, subject.raw
    name = f"question {rehearsed.question.id!r}"
    if trajectory.stop_reason is StopReason.TURN_LIMIT:
        needed = max(map(len, rehearsed.turns))
        what = f"{name}: the right answer, or a query of {QUERY_WORDS} words, takes {needed} tokens; "
        return Finding(
            "error", f"{what}`max_turn_tokens` is {raw.max_turn_tokens}", recipe.line("max_turn_tokens", needed)
        )
    if trajectory.stop_reason is StopReason.TRAJECTORY_LIMIT:
        what = f"{name}: one search and the right answer do not fit `max_completion_length`: all would be cut short"
        what += " and, by `mask_truncated_completions`, not trained on" * bool(raw.mask_truncated_completions)
        return Finding("error", what, recipe.line("max_completion_length"))
    if trajectory.stop_reason is StopReason.OBSERVATION_LIMIT:
        return _no_room(subject, name)
    kinds = [turn.action.kind for turn in trajectory.turns]
    if kinds != [ActionKind.SEARCH] * (len(rehearsed.turns) - 1) + [ActionKind.ANSWER]:
        read = [(turn.text, turn.action.kind.value) for turn in trajectory.turns]
        what = f"{name}: the tokenizer makes of {rehearsed.texts} what is read as {read}"
        return Finding("error", what, recipe.line("model_name_or_path"))
    nothing_read = any(len(seen.token_ids) <= _frame_size(subject) for seen in trajectory.observations)
    return _no_room(subject, name) if nothing_read else None


def _no_room(subject: Subject, name: str) -> Finding:
    limit = subject.rollout.max_observation_tokens
    what = f"{name}: `max_observation_tokens` of {limit} has no room for a passage that holds the answer alone"
    return Finding("error", what, subject.recipe.line("max_observation_tokens"))


def _frame_size(subject: Subject) -> int:
    """Tokens around the passages of an observation."""
    tokenizer = given(subject.tokenizer, "the tokenizer")
    frame = subject.rollout.tag_protocol(tokenizer, subject.chat_template_kwargs).information_frame
    return sum(_sizes(tokenizer, [frame.prefix, frame.suffix]))


def _check_loss_mask(trajectories: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """The rows that the trainer gets: what is trained on is what was said, token by token."""
    rows = rollout_output(trajectories, tokenizer.eos_token_id)
    for trajectory, ids, mask in zip(trajectories, rows["completion_ids"], rows["env_mask"], strict=True):
        trained = [token_id for token_id, keep in zip(ids, mask, strict=True) if keep]
        said = [token_id for turn in trajectory.turns for token_id in turn.token_ids]
        if trained != said or not said:
            yield Finding(
                "error", f"{decode(tokenizer, said)!r} was said, {decode(tokenizer, trained)!r} is trained on"
            )
            return
    sizes = " and ".join(f"{sum(mask)} of {len(mask)} tokens" for mask in rows["env_mask"])
    yield Finding("ok", f"a search and an answer, said by a script: {sizes} are trained on")


def _check_rewards(
    subject: Subject, questions: Sequence[Question], trajectories: Sequence[Trajectory]
) -> Iterator[Finding]:
    """The right answer must pay, by every reward."""
    rows = qa.build_prompt_rows(questions)
    columns: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in rows[0]}
    for name in given(subject.arguments.task, "the arguments of the task").rewards:
        rewards = qa.REWARDS[name](trajectory=trajectories, **columns)
        totals = [sum(reward) if isinstance(reward, list) else reward for reward in rewards]
        # A search is credited for what it finds, which was made up here, and for no "yes" or "no".
        if name != "search_hit" and min(totals) <= 0:
            worst = totals.index(min(totals))
            answer, said = questions[worst].golden_answers, trajectories[worst].answer
            what = f"`rewards`: {name} of a right answer to {questions[worst].id!r} is {totals[worst]}: "
            what += f"the tokenizer writes {said!r} for one of {answer}"
            yield Finding("error", what, subject.recipe.line("rewards"))
        else:
            yield Finding("ok", f"{name} of the right answers: {', '.join(f'{total:g}' for total in totals)}")


def _check_observations(subject: Subject, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """How much of what was really found the policy gets to read."""
    limit, found = subject.rollout.max_observation_tokens, list(filter(None, subject.passages))
    if not found:
        return
    protocol = subject.rollout.tag_protocol(tokenizer, subject.chat_template_kwargs)
    cut = sum(ObservationEncoder(tokenizer, protocol, limit).passages(each).truncated for each in found)
    whole = max(_sizes(tokenizer, [protocol.render_passages(each) for each in found]))
    fate = "are cut to" if subject.rollout.on_long_observation == "truncate" else "end the trajectory, with more than"
    what = f"{cut} of {len(found)} observations {fate} {limit} tokens; their passages take up to {whole}"
    if cut == len(found):
        yield Finding("warning", what, subject.recipe.line("max_observation_tokens"))
    else:
        yield Finding("ok", what)


def _sizes(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> list[int]:
    return [len(tokenizer.encode(text, add_special_tokens=False, verbose=False)) for text in texts]
