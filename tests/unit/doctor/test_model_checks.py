"""Tokenizers, models and chat templates that do not serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sorl_trl.doctor import examine
from tests.agents import agent_tokenizer
from tests.unit.doctor.recipes import complaints, line_of, the_complaint, write_model, write_recipe
from tests.unit.rollout.fakes import CHAT_TEMPLATE, bpe_tokenizer

FORGETS_THOUGHTS = CHAT_TEMPLATE.replace(
    "{{ m['content'] }}", "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}"
)


class TestModel:
    def test_a_name_that_cannot_be_reached(self, tmp_path: Path) -> None:
        recipe = write_recipe(tmp_path, model_name_or_path="nobody/has-this-model")
        found = the_complaint(recipe)
        assert (found.check, found.level) == ("model", "error")
        assert found.what.startswith("nobody/has-this-model cannot be loaded: ")
        assert found.change == f"model_name_or_path  {line_of(recipe, 'model_name_or_path')}"

    @pytest.mark.parametrize("value", ["wide", [16], None])
    def test_a_configuration_with_a_value_of_the_wrong_kind(self, tmp_path: Path, value: object) -> None:
        recipe = write_recipe(tmp_path, max_steps_=1)
        path = tmp_path / "model/config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "num_attention_heads": value}))
        other, found = complaints(recipe)
        assert "`max_steps_` is no argument" in other.what
        assert (found.check, found.level) == ("model", "error")
        assert found.what.startswith(f"{tmp_path}/model cannot be loaded: ")
        assert found.change == f"model_name_or_path  {line_of(recipe, 'model_name_or_path')}"

    def test_no_end_of_sequence(self, tmp_path: Path) -> None:
        tokenizer = agent_tokenizer()
        tokenizer.eos_token = None
        write_model(tmp_path / "model", tokenizer)
        assert "no end-of-sequence token" in the_complaint(write_recipe(tmp_path)).what

    def test_more_tokens_than_embeddings(self, tmp_path: Path) -> None:
        write_model(tmp_path / "model", vocab_size=16)
        found = the_complaint(write_recipe(tmp_path))
        assert (found.check, found.what) == (
            "model",
            "the tokenizer knows 17 tokens, but the model has embeddings for 16",
        )

    def test_a_tokenizer_that_cannot_write_a_tag(self, tmp_path: Path) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1, "<search>": 2}, unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        broken = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>")
        write_model(tmp_path / "model", broken)
        tags, rehearsal = complaints(write_recipe(tmp_path))
        assert (tags.check, tags.level) == ("tags", "error")
        assert tags.what.startswith("tokenizer writes '</search>' as '<unk>'")
        assert rehearsal.what == tags.what

    def test_tags_may_be_special_tokens(self, tmp_path: Path) -> None:
        tokenizer = agent_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": ["</search>"]})
        write_model(tmp_path / "model", tokenizer)
        assert not complaints(write_recipe(tmp_path))
        with_vllm = {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"}
        assert not complaints(write_recipe(tmp_path, **with_vllm))

    def test_a_token_that_reaches_beyond_the_tag_is_explained(self, tmp_path: Path) -> None:
        write_model(tmp_path / "model", bpe_tokenizer(), max_position_embeddings=512)
        limits = {"max_turn_tokens": 60, "max_observation_tokens": 60, "max_completion_length": 400}
        found = examine(str(write_recipe(tmp_path, **limits)))
        (tags,) = [finding for finding in found if finding.check == "tags"]
        assert tags.level == "ok"
        assert "the last may reach into '\\n\\n' behind the tag" in tags.what


class TestChat:
    @pytest.fixture
    def limits(self) -> dict[str, Any]:
        return {"chat": True, "max_turn_tokens": 60, "max_observation_tokens": 120, "max_completion_length": 420}

    def write(self, folder: Path, template: str | None) -> None:
        tokenizer = bpe_tokenizer()
        whole, tokenizer.chat_template = tokenizer.chat_template, template
        write_model(folder / "model", tokenizer, max_position_embeddings=512)
        tokenizer.chat_template = whole  # the tokenizer is shared

    def test_a_template_that_serves(self, tmp_path: Path, limits: dict[str, Any]) -> None:
        self.write(tmp_path, CHAT_TEMPLATE)
        assert not complaints(write_recipe(tmp_path, **limits))

    def test_no_template(self, tmp_path: Path, limits: dict[str, Any]) -> None:
        self.write(tmp_path, None)
        recipe = write_recipe(tmp_path, **limits)
        found = the_complaint(recipe)
        assert found.what == "`chat` is true, but the tokenizer has no chat template"
        assert found.change == f"chat: false  {line_of(recipe, 'chat')}"

    def test_a_template_that_fails(self, tmp_path: Path, limits: dict[str, Any]) -> None:
        self.write(tmp_path, "{{ raise_exception('only the user may speak') }}")
        found = the_complaint(write_recipe(tmp_path, **limits))
        assert (found.check, found.level) == ("chat", "error")
        assert found.what == "the chat template cannot show a conversation: only the user may speak"

    def test_a_template_that_hides_the_user(self, tmp_path: Path, limits: dict[str, Any]) -> None:
        self.write(tmp_path, CHAT_TEMPLATE.replace("for m in messages", "for m in messages[:2]"))
        found = the_complaint(write_recipe(tmp_path, **limits))
        assert (found.check, found.level) == ("chat", "error")
        assert "it must show the assistant's and then the user's message" in found.what

    def test_a_template_that_forgets(self, tmp_path: Path, limits: dict[str, Any]) -> None:
        self.write(tmp_path, FORGETS_THOUGHTS)
        found = the_complaint(write_recipe(tmp_path, **limits))
        assert (found.check, found.level) == ("chat", "warning")
        assert "renders earlier messages otherwise" in found.what
