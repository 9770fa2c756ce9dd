from __future__ import annotations

import pytest
import torch

from sorl_trl.sandbox import PROTOCOL, PolicyConfig, World, make_policy, train_tokenizer
from sorl_trl.sandbox.policy import TAGS
from sorl_trl.types import Action, ActionKind


@pytest.fixture(scope="module")
def tokenizer(invented: World):
    return train_tokenizer([invented])


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
