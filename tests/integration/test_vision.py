"""A vision-language policy, with images in its prompts: trained as by TRL, and resumed exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from trl import GRPOConfig, GRPOTrainer

from sorl_trl import SOGRPOConfig, SOGRPOTrainer, SOPPOConfig, SOPPOTrainer
from tests.policies import SHAPE, word_tokenizer
from tests.training import IN_FLOAT64, assert_same, settings

SIDE = 16
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} "
    "{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }} {% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


@pytest.fixture
def policy(tmp_path: Path) -> str:
    """A random LLaVA that reads four patches and a class token of each image, with its processor."""
    tokenizer = word_tokenizer(["<pad>", "<eos>", "<unk>", "<image>", "user", "assistant", "what", "w1", "w2", "w3"])
    tokenizer.add_tokens("<image>", special_tokens=True)  # found where no space is around it
    tokenizer.chat_template = TEMPLATE
    image = tokenizer.convert_tokens_to_ids("<image>")
    seen = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=SIDE, patch_size=8
    )  # fmt: skip
    torch.manual_seed(0)
    read = LlamaConfig(vocab_size=len(tokenizer), **SHAPE)
    config = LlavaConfig(vision_config=seen, text_config=read, image_token_id=image, vision_feature_layer=-1)
    LlavaForConditionalGeneration(config).double().save_pretrained(tmp_path / "policy")
    square = {"height": SIDE, "width": SIDE}
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=square)
    LlavaProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default", chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    ).save_pretrained(tmp_path / "policy")  # fmt: skip
    return str(tmp_path / "policy")


def pictures() -> Dataset:
    pixels = np.random.default_rng(0).integers(0, 256, (8, SIDE, SIDE, 3), dtype=np.uint8)
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what"}]}]
    return Dataset.from_list([{"prompt": asked, "image": Image.fromarray(each)} for each in pixels])


def length(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(each[0]["content"])) for each in completions]


def build(trainer_class: Any, config: Any, policy: str, folder: Path, **overrides: Any) -> Any:
    torch.manual_seed(1)
    args = config(**settings(folder, **IN_FLOAT64, **overrides))
    return trainer_class(policy, length, args, pictures())


def test_it_is_trained_as_by_trl(policy: str, tmp_path: Path) -> None:
    theirs = build(GRPOTrainer, GRPOConfig, policy, tmp_path / "theirs")
    theirs.train()
    plain = {"importance_sampling_level": "token", "loss_type": "dapo", "target_kl": 0.0}
    args = SOGRPOConfig(**settings(tmp_path / "ours", **IN_FLOAT64, **plain))
    torch.manual_seed(1)
    ours = SOGRPOTrainer(policy, length, args, pictures(), method={"terms": ()})
    ours.train()
    assert_same(ours, theirs)


def test_it_continues_exactly(policy: str, tmp_path: Path) -> None:
    whole = build(SOPPOTrainer, SOPPOConfig, policy, tmp_path / "whole", save_strategy="steps", save_steps=1)
    whole.train()
    resumed = build(SOPPOTrainer, SOPPOConfig, policy, tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for name, weight in resumed.model.state_dict().items():
        assert torch.equal(weight, whole.model.state_dict()[name]), name
