from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sorl_trl.sandbox import (
    NO_NOISE,
    PROMPT_TEMPLATE,
    PROTOCOL,
    PolicyConfig,
    WarmStartConfig,
    World,
    expert_examples,
    imitate,
    make_policy,
    train_tokenizer,
    warm_start,
)
from sorl_trl.sandbox.imitation import TAGS, _loss
from sorl_trl.types import Action, ActionKind

TINY = WarmStartConfig(policy=PolicyConfig(16, 1, 2), noise=NO_NOISE, trajectories=40, steps=3, batch_size=4)


@pytest.fixture(scope="module")
def tokenizer(invented: World):
    return train_tokenizer([invented])


def test_only_what_the_expert_wrote_is_labelled(tokenizer, invented: World):
    examples = expert_examples(invented, tokenizer, 10, TINY)
    assert len(examples) == 10
    for example, question in zip(examples, invented.train, strict=False):
        text = tokenizer.decode(example.input_ids)
        learnt = tokenizer.decode([token for token in example.labels if token != -100])
        assert text.startswith(PROMPT_TEMPLATE.format(question=question.question))
        assert "<information>" in text
        assert learnt.startswith("<search>") and learnt.endswith("</answer>")
        assert "<information>" not in learnt and "question" not in learnt
        assert len(example.input_ids) == len(example.labels)


@pytest.mark.trains
def test_imitation_lowers_the_loss(tokenizer, invented: World):
    examples = expert_examples(invented, tokenizer, 40, TINY)
    model = make_policy(tokenizer, TINY.policy, 0)
    before = _loss(model, examples).item()
    imitate(model, examples, 40, TINY.batch_size, 1e-2, TINY.seed)
    assert _loss(model, examples).item() < 0.8 * before
    assert not model.training


@pytest.mark.trains
def test_the_result_loads_as_any_other_checkpoint_and_is_deterministic(invented: World, tmp_path: Path):
    one = warm_start(invented, [invented], tmp_path / "one", TINY)
    same = warm_start(invented, [invented], tmp_path / "same", TINY)
    assert one.name == same.name
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (one, same)]
    assert torch.equal(models[0].lm_head.weight, models[1].lm_head.weight)
    assert len(AutoTokenizer.from_pretrained(one)) == models[0].config.vocab_size


@pytest.mark.trains
def test_the_cache_is_hit_by_equal_inputs_alone(invented: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = warm_start(invented, [invented], tmp_path, TINY)
    trained = []
    monkeypatch.setattr("sorl_trl.sandbox.imitation.imitate", lambda *arguments: trained.append(arguments))
    assert warm_start(invented, [invented], tmp_path, replace(TINY)) == first
    assert not trained
    others = [
        warm_start(invented, [invented], tmp_path, replace(TINY, seed=1)),
        warm_start(invented, [replace(invented, train=invented.train[1:])], tmp_path, TINY),
        warm_start(replace(invented, name="other"), [invented], tmp_path, TINY),
    ]
    assert len(trained) == 3
    assert len({first, *others}) == 4


@pytest.mark.parametrize("tag", TAGS)
def test_each_tag_is_one_token_with_or_without_spaces_around_it(tokenizer, tag):
    (tag_id,) = tokenizer.encode(tag, add_special_tokens=False)
    assert tokenizer.encode(f"born{tag}born", add_special_tokens=False)[1] == tag_id


def test_decoded_turns_parse(tokenizer):
    ids = tokenizer.encode("<search>born works</search>", add_special_tokens=False)
    assert len(ids) == 4
    assert PROTOCOL.parse(tokenizer.decode(ids)) == Action(ActionKind.SEARCH, "born works")
    assert PROTOCOL.parse(tokenizer.decode(ids, skip_special_tokens=True)).kind is ActionKind.SEARCH


def test_a_seed_fixes_the_policy_and_nothing_else(tokenizer):
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    one, same, other = (make_policy(tokenizer, PolicyConfig(16, 1, 2), seed) for seed in (0, 0, 1))
    assert torch.rand(1) == expected
    assert torch.equal(one.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert one.lm_head.weight is one.model.embed_tokens.weight
    assert one.lm_head.weight.shape == (len(tokenizer), 16)
