"""Reads a dataset row as TRL does: its environment, its prompt and its images.

It follows the body of `GRPOTrainer._generate_and_score_completions` in TRL 1.16, with two differences: the text that
an environment's `reset` returns is sanitized, and dataset rows are not modified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.data_utils import apply_chat_template, is_conversational, prepare_multimodal_messages

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


def prompts_of(trainer: Any, rows: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[Any] | None]:
    """The prompts of these rows, and the images of each if there are any.

    Environments are drawn and reset, and TRL's attributes for them are set, which its `_generate` and
    `_calculate_rewards` read.

    Raises:
        ValueError: A row names an environment that does not exist, or has images with a plain-text prompt.
    """
    if trainer.environment_factories is None:
        prompts = [row["prompt"] for row in rows]
    else:
        prompts = [row.get("prompt", [{"role": "user", "content": ""}]) for row in rows]
        _draw_environments(trainer, rows)
    if trainer.tools:
        _set_tools(trainer, len(rows))
    if trainer.environments:
        prompts = [
            _greeted(trainer, prompt, environment, row)
            for prompt, environment, row in zip(prompts, trainer.environments, rows, strict=True)
        ]
    images = _images(rows)
    if images is not None:
        if not is_conversational(rows[0]):
            raise ValueError(
                "The dataset has images, but its prompts are plain text, as after a chat template: give the trainer "
                "messages, such as [{'role': 'user', 'content': '…'}], to which it applies the template."
            )
        prompts = [
            prepare_multimodal_messages(prompt, images=own) for prompt, own in zip(prompts, images, strict=True)
        ]
    return prompts, images


def _draw_environments(trainer: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """One environment per row, from TRL's pools, which grow when a batch needs more."""
    names = [row.get("environment") if trainer._multi_environment else None for row in rows]
    known = trainer.environment_factories
    if trainer._multi_environment and (unknown := [name for name in names if name not in known]):
        raise ValueError(  # in TRL's words
            f"A row has `environment` {unknown[0]!r}, which is not among the environments passed to "
            f"`environment_factory`: {list(known)}."
        )
    taken: dict[str | None, int] = {}
    trainer._batch_environments, trainer.environments = names, []
    for name in names:
        pool, number = trainer._environment_pool[name], taken.get(name, 0)
        if number == len(pool):
            pool.append(known[name]())
        trainer.environments.append(pool[number])
        taken[name] = number + 1


def _set_tools(trainer: Any, count: int) -> None:
    """Set each row's tools. TRL sees none as a coroutine, because it would call coroutines after all others."""
    environments = trainer.environments or [None] * count
    trainer._sync_tool_dicts = [trainer._tools.tools_of(environment) for environment in environments]
    trainer._async_tool_dicts = [{}] * count


def _greeted(trainer: Any, prompt: Any, environment: Any, row: Mapping[str, Any]) -> Any:
    """The prompt with the environment's `reset` text, sanitized, at the end of its last message."""
    arguments = {name: value for name, value in row.items() if name != "environment"}
    own = None if isinstance(prompt, str) else prompt[-1].get("content")
    if isinstance(own, list):  # an environment may change the blocks that it gets
        own = [dict(block) for block in own]
    observation = environment.reset(**(arguments if trainer._multi_environment else row))
    if observation is None:
        return prompt
    content = prompt[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    content = trainer._tools.greeting(own or "", content + observation)
    return [*prompt[:-1], {**prompt[-1], "content": content}]


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
    trainer: Any, prompts: Sequence[Any], images: Sequence[Any] | None, batch: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The `IMAGE_INPUTS` fields of a batch with these `images` per row."""
    if images is None:
        return {}
    texts = [
        apply_chat_template({"prompt": prompt}, trainer.processing_class, tools=tools, **trainer.chat_template_kwargs)
        for prompt, tools in zip(prompts, _shown_tools(trainer, len(prompts)), strict=True)
    ]
    made = trainer.processing_class(
        images=images, text=[each["prompt"] for each in texts], padding=True, return_tensors="pt"
    )
    inputs = dict(super(GRPOTrainer, trainer)._prepare_inputs(made))
    for name in {"token_type_ids", "mm_token_type_ids"} & inputs.keys():
        left = batch["prompt_ids"].size(1) - inputs[name].size(1)  # with `pad_to_multiple_of`
        inputs[name] = torch.nn.functional.pad(inputs[name], (max(left, 0), batch["completion_ids"].size(1)))
    inputs["num_images"] = [len(own) if own else 0 for own in images]
    if (tiles := _tiles(trainer, inputs, images)) is not None:
        inputs["num_tiles"] = tiles
    return {name: inputs[name] for name in IMAGE_INPUTS if name in inputs}


def _shown_tools(trainer: Any, count: int) -> list[Any]:
    if trainer.environment_factories is None:
        return [trainer.tools] * count
    return [trainer._env_tools[name] for name in trainer._batch_environments]


def _tiles(trainer: Any, inputs: Mapping[str, Any], images: Sequence[Any]) -> list[int] | None:
    """How many tiles each row has, for models with pixels indexed by tile: LFM2-VL and InternVL."""
    process, pixels, counts = trainer.processing_class.image_processor, inputs["pixel_values"], inputs["num_images"]
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
