"""Reads a dataset row as the body of `GRPOTrainer._generate_and_score_completions` in TRL 1.16: prompt and images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from trl.data_utils import apply_chat_template, is_conversational, prepare_multimodal_messages

from sorl_trl.rollout.chat import NO_PROMPT
from sorl_trl.trainers.host import Host

IMAGE_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)
"""Fields of a batch that the policy reads besides ids and masks, if prompts have images."""


def prompts_of(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[Any] | None]:
    """The prompts of these rows, and the images of each if there are any.

    A row without a prompt has an environment that writes it: `check_names` has refused any other.

    Raises ValueError for images with a plain-text prompt.
    """
    prompts = [row.get("prompt", NO_PROMPT) for row in rows]
    images = _images(rows)
    if images is None:
        return prompts, None
    if not is_conversational({"prompt": prompts[0]}):
        raise ValueError(
            "The dataset has images, but its prompts are plain text, as after a chat template: give the trainer "
            "messages, such as [{'role': 'user', 'content': '…'}], to which it applies the template."
        )
    with_images = [prepare_multimodal_messages(*each) for each in zip(prompts, images, strict=True)]
    return with_images, images


def _images(rows: Sequence[Mapping[str, Any]]) -> list[Any] | None:
    """The images of each row, or None if no row has any, because transformers rejects empty image lists."""
    if "images" in rows[0]:
        images = [row.get("images") for row in rows]
    elif "image" in rows[0]:
        images = [[row.get("image")] if row.get("image") is not None else None for row in rows]
    else:
        return None
    return None if all(own == [] for own in images) else images


# -------------------------------------------------------------------------------------------------------------------
# Images as tensors
# -------------------------------------------------------------------------------------------------------------------


def image_inputs(
    host: Host, prompts: Sequence[Any], images: Sequence[Any], batch: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The `IMAGE_INPUTS` fields of a batch with these `images` per row."""
    processor, options = host.processing_class, host.template_options
    texts = [apply_chat_template({"prompt": prompt}, processor, **options)["prompt"] for prompt in prompts]
    inputs = host.prepared(processor(images=images, text=texts, padding=True, return_tensors="pt"))
    for name in {"token_type_ids", "mm_token_type_ids"} & inputs.keys():
        left = batch["prompt_ids"].size(1) - inputs[name].size(1)  # with `pad_to_multiple_of`
        inputs[name] = torch.nn.functional.pad(inputs[name], (max(left, 0), batch["completion_ids"].size(1)))
    inputs["num_images"] = [len(own) if own else 0 for own in images]
    if (tiles := _tiles(processor.image_processor, inputs, images)) is not None:
        inputs["num_tiles"] = tiles
    return {name: inputs[name] for name in IMAGE_INPUTS if name in inputs}


def _tiles(process: Any, inputs: Mapping[str, Any], images: Sequence[Any]) -> list[int] | None:
    """How many tiles each row has, for models with pixels indexed by tile: LFM2-VL and InternVL."""
    pixels, counts = inputs["pixel_values"], inputs["num_images"]
    if "spatial_shapes" in inputs:
        made = process(images=images, return_tensors="pt", return_row_col_info=True)
        tiles = made["image_rows"] * made["image_cols"]
        if process.use_thumbnail:
            tiles = tiles + (tiles > 1).to(tiles.dtype)
    elif pixels.ndim == 4 and pixels.size(0) != sum(counts):
        tiles = process(images=images, crop_to_patches=True, return_tensors="pt")["num_patches"]
    else:
        return None
    return [int(own.sum()) for own in tiles.split(counts)]
