"""What TRL reads of a row of the dataset: its environment, its prompt and its images.

It does what `GRPOTrainer._generate_and_score_completions` of TRL 1.16 does in its own body, with two differences:
what an environment's `reset` says is sanitized, and the rows of the dataset are left as they are.
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
"""Fields of a batch that the policy reads besides ids and masks, if its prompts have images."""


def prompts_of(trainer: Any, rows: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[Any] | None]:
    """The prompts of these rows, and the images of each if there are any.

    Environments are drawn and reset, and TRL's attributes for them are set: its `_generate` and `_calculate_rewards`
    read them.

    Raises:
        ValueError: A row names an environment that does not exist, or has images beside a prompt of text.
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
                "The dataset has images beside prompts of text, as after a chat template: give the trainer messages, "
                "such as [{'role': 'user', 'content': '…'}], to which it applies the template."
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
        raise ValueError(f"A row has `environment` {unknown[0]!r}, but `environment_factory` has {list(known)}.")
    taken: dict[str | None, int] = {}
    trainer._batch_environments, trainer.environments = names, []
    for name in names:
        pool, number = trainer._environment_pool[name], taken.get(name, 0)
        if number == len(pool):
            pool.append(known[name]())
        trainer.environments.append(pool[number])
        taken[name] = number + 1


def _set_tools(trainer: Any, count: int) -> None:
    """The tools of each row. None is a coroutine for TRL, which would call coroutines after all others."""
    environments = trainer.environments or [None] * count
    trainer._sync_tool_dicts = [trainer._tools.tools_of(environment) for environment in environments]
    trainer._async_tool_dicts = [{}] * count


def _greeted(trainer: Any, prompt: Any, environment: Any, row: Mapping[str, Any]) -> Any:
    """The prompt with what the environment's `reset` says, sanitized, at the end of its last message."""
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
    """The images of each row, or None if no row has one: transformers takes no batch without images for one with."""
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
    trainer: Any,
    prompts: Sequence[Any],
    images: Sequence[Any] | None,
    tool_images: Sequence[Any],
    batch: Mapping[str, Tensor],
) -> dict[str, Any]:
    """The fields in `IMAGE_INPUTS` of a batch whose `images`, per row, are in prompts or were returned by tools."""
    if images is None:
        return {}
    counts: list[int] | None = [len(own) if own else 0 for own in images]
    by_tools = bool(trainer.tools and trainer._is_vlm and any(tool_images))
    inputs = _processed(trainer, prompts, images, by_tools)
    tiles = _tiles(trainer, inputs, images, counts)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    if by_tools:
        kinds = _kinds_of_tokens(trainer, ids)
        grid = inputs.get("image_grid_thw")
        inputs["token_type_ids" if grid is None else "mm_token_type_ids"] = kinds
        if grid is not None and not _all_there(trainer, kinds, grid, counts):  # a limit has cut an image's tokens
            del inputs["pixel_values"], inputs["image_grid_thw"]
            kinds.zero_()
            counts = None
    else:
        for name in {"token_type_ids", "mm_token_type_ids"} & inputs.keys():
            own = inputs[name]
            left = batch["prompt_ids"].size(1) - own.size(1)  # with `pad_to_multiple_of`
            inputs[name] = torch.nn.functional.pad(own, (max(left, 0), batch["completion_ids"].size(1)))
    inputs["num_images"] = counts
    if tiles is not None:
        inputs["num_tiles"] = tiles
    return {name: inputs[name] for name in IMAGE_INPUTS if name in inputs}


def _processed(trainer: Any, prompts: Sequence[Any], images: Sequence[Any], by_tools: bool) -> dict[str, Any]:
    """What the processor makes of images, on the device: of all that were shown, or with the prompts they are in."""
    if by_tools:
        flat = [image for own in images if own for image in own]
        made = trainer.processing_class.image_processor(images=flat, return_tensors="pt")
    else:
        texts = [
            apply_chat_template(
                {"prompt": prompt}, trainer.processing_class, tools=tools, **trainer.chat_template_kwargs
            )["prompt"]
            for prompt, tools in zip(prompts, _shown_tools(trainer, len(prompts)), strict=True)
        ]
        made = trainer.processing_class(images=images, text=texts, padding=True, return_tensors="pt")
    on_device = super(GRPOTrainer, trainer)._prepare_inputs(made)
    return {name: value for name, value in on_device.items() if name not in ("input_ids", "attention_mask")}


def _shown_tools(trainer: Any, count: int) -> list[Any]:
    if trainer.environment_factories is None:
        return [trainer.tools] * count
    return [trainer._env_tools[name] for name in trainer._batch_environments]


def _tiles(
    trainer: Any, inputs: Mapping[str, Any], images: Sequence[Any], counts: list[int] | None
) -> list[int] | None:
    """How many tiles each row has, for models whose pixels are indexed by tiles: LFM2-VL and InternVL."""
    process, pixels = trainer.processing_class.image_processor, inputs["pixel_values"]
    if "spatial_shapes" in inputs:
        made = process(images=images, return_tensors="pt", return_row_col_info=True)
        tiles = made["image_rows"] * made["image_cols"]
        if process.use_thumbnail:
            tiles = tiles + (tiles > 1).to(tiles.dtype)
    elif pixels.ndim == 4 and pixels.size(0) != sum(counts or ()):
        tiles = process(images=images, crop_to_patches=True, return_tensors="pt")["num_patches"]
    else:
        return None
    return [int(own.sum()) for own in tiles.split(list(counts or ()))]


def _kinds_of_tokens(trainer: Any, ids: Tensor) -> Tensor:
    """(B, P + T) 1 on tokens of images, 2 on those of videos, 0 on text."""
    kinds = torch.zeros_like(ids)
    for kind, token in ((1, trainer._image_pad_token_id), (2, trainer._video_pad_token_id)):
        if token is not None:
            kinds[ids == token] = kind
    return kinds


def _all_there(trainer: Any, kinds: Tensor, grid: Tensor, counts: Sequence[int] | None) -> bool:
    """Whether each row has as many image tokens as its images have features."""
    merged = getattr(trainer.processing_class.image_processor, "merge_size", 2) ** 2
    features: Sequence[Tensor] = (grid.prod(dim=1) // merged).split(list(counts or ()))  # type: ignore[no-untyped-call]
    return all(int((row == 1).sum()) == int(own.sum()) for row, own in zip(kinds, features, strict=True))
