"""The search engine: whether it answers, how fast, and with what."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from sorl_trl.doctor.findings import Finding, Unavailable
from sorl_trl.doctor.subject import Subject, given
from sorl_trl.search import HTTPSearch, SearchArguments, SearchBackend, SearchError
from sorl_trl.search.arguments import CORPUS_ENGINES, SOURCES
from sorl_trl.search.backend import INFRASTRUCTURE_ERRORS
from sorl_trl.text import one_line
from sorl_trl.types import Passage

SINGLE_QUERIES = 5
SLOW_S = 1.0
"""Seconds for the searches of one turn, for which the whole rollout waits: more is worth a warning."""
TIMEOUT_S = 10.0
BUILT_AT_ONCE = 32 << 20
"""Bytes of a corpus that is indexed for the examination alone, in seconds."""


def check_search(subject: Subject) -> Iterator[Finding]:
    """Opens what the recipe searches, and asks it some of the questions. Leaves no file behind."""
    arguments = given(subject.arguments.search, "the arguments of the search")
    source = next(name for name in SOURCES if getattr(arguments, name))
    line = subject.recipe.line(source)
    if arguments.no_search:
        yield Finding("ok", "`no_search`: nothing is searched")
        return
    try:
        with _opened(arguments) as backend:
            if arguments.replay:
                yield from _check_recording(subject, arguments.replay)
            else:
                yield from _try_out(subject, backend, line)
    except SearchError as error:
        yield Finding("error", f"the engine refuses the questions: {one_line(error)}", line)
    except INFRASTRUCTURE_ERRORS as error:
        yield Finding("error", f"the engine does not answer: {one_line(error)}", line)
    except (OSError, ValueError, ImportError) as error:
        yield Finding("error", one_line(error), line)


@contextmanager
def _opened(arguments: SearchArguments) -> Iterator[SearchBackend]:
    """The engine without what goes around it: retries would hide how it is, and a recording would be spoilt."""
    if arguments.search_url:
        yield HTTPSearch(arguments.search_url, arguments.search_request, timeout_s=TIMEOUT_S)
        return
    engine, ending = CORPUS_ENGINES[arguments.search_engine]
    if not arguments.corpus or Path(f"{arguments.corpus}.{ending}").exists():
        yield replace(arguments, record=None, search_cache=None).build_search().backend
        return
    if os.path.getsize(arguments.corpus) > BUILT_AT_ONCE:
        paths = f"--corpus {arguments.corpus} --output {arguments.corpus}.{ending}"
        command = f"python -m sorl_trl.search.index --engine {arguments.search_engine} {paths}"
        raise Unavailable(f"an index, which training would build first: {command}")
    with TemporaryDirectory() as folder:
        yield engine.build(arguments.corpus, Path(folder) / "index", show_progress=False)


def _check_recording(subject: Subject, path: str) -> Iterator[Finding]:
    """Whether a recording, which could be opened, has such searches: the first that it lacks ends the training."""
    yield Finding("ok", f"{path} can be replayed")
    with open(path, "rb") as file:
        recorded = Counter(json.loads(line)["k"] for line in file if line.endswith(b"\n"))
    top_k = subject.rollout.search_top_k
    if top_k not in recorded:
        what = (
            f"`search_top_k` is {top_k}, but {path} has only searches for {' or '.join(map(str, sorted(recorded)))} "
        )
        nearest = recorded.most_common(1)[0][0]
        yield Finding("error", f"{what}passages", subject.recipe.line("search_top_k", nearest))


def _try_out(subject: Subject, backend: SearchBackend, line: str) -> Iterator[Finding]:
    queries = [question.question for question in given(subject.questions, "questions")]
    top_k, few = subject.rollout.search_top_k, queries[:SINGLE_QUERIES]
    singles = [_timed_search(backend, [query], top_k) for query in few]
    subject.passages = [passages for results, _ in singles for passages in results]
    yield from _check_passages(subject, line)
    step = queries[: _rows_per_process(subject)]
    _, batch_s = _timed_search(backend, step, top_k)
    shown = f"one query takes {1000 * median(seconds for _, seconds in singles):.2g} ms (median of {len(few)}), "
    shown += f"{len(step)} at once {batch_s:.2f} s"
    if batch_s > SLOW_S:
        yield Finding("warning", f"{shown}: every turn of a rollout waits for that", line)
    else:
        yield Finding("ok", shown)


def _timed_search(backend: SearchBackend, queries: Sequence[str], k: int) -> tuple[list[list[Passage]], float]:
    started = time.monotonic()
    return backend.search_batch(queries, k), time.monotonic() - started


def _check_passages(subject: Subject, line: str) -> Iterator[Finding]:
    most, top_k = max(map(len, subject.passages), default=0), subject.rollout.search_top_k
    asked = f"{len(subject.passages)} questions"
    if not most:
        yield Finding("warning", f"{asked} found nothing at all: is it the right corpus?", line)
    elif most < top_k:
        what = f"no more than {most} passages for any of {asked}, but `search_top_k` is {top_k}"
        yield Finding("warning", what, subject.recipe.line("search_top_k", most))


def _rows_per_process(subject: Subject) -> int:
    """Trajectories that one process collects, and so searches for, at a time."""
    config = given(subject.arguments.config, "the trainer's config")
    return max(int(config.generation_batch_size or 1) // subject.num_processes, 1)
