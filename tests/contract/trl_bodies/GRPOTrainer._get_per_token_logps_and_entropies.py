# An excerpt of trl 1.16.0, trl.trainer.grpo_trainer: copyright The HuggingFace Team, licensed
# under the Apache License, Version 2.0. Changed: no comments, no docstrings, another layout.

@profiling_decorator
def _get_per_token_logps_and_entropies(
    self,
    model,
    input_ids,
    attention_mask,
    logits_to_keep,
    batch_size=None,
    compute_entropy=False,
    compute_aux_loss=False,
    pixel_values=None,
    image_grid_thw=None,
    num_images=None,
    pixel_attention_mask=None,
    spatial_shapes=None,
    num_tiles=None,
    image_sizes=None,
    token_type_ids=None,
    mm_token_type_ids=None,
    image_position_ids=None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    batch_size = batch_size or input_ids.size(0)
    all_logps = []
    all_entropies = []
    all_aux_losses = []
    for start in range(0, input_ids.size(0), batch_size):
        end = min(start + batch_size, input_ids.size(0))
        input_ids_batch = input_ids[start:end]
        attention_mask_batch = attention_mask[start:end]
        model_inputs = {"input_ids": input_ids_batch, "attention_mask": attention_mask_batch}
        if num_images is not None:
            cum_imgs = torch.tensor([0] + num_images).cumsum(0)
            img_start, img_end = (cum_imgs[start], cum_imgs[end])
        if image_grid_thw is not None and pixel_values is not None:
            rows_per_image = image_grid_thw.prod(dim=-1)
            rows_per_sample = torch.split(rows_per_image, num_images)
            rows_per_sample = torch.stack([s.sum() for s in rows_per_sample])
            cum_rows = torch.cat([torch.tensor([0], device=rows_per_sample.device), rows_per_sample.cumsum(0)])
            row_start, row_end = (cum_rows[start].item(), cum_rows[end].item())
            model_inputs["pixel_values"] = pixel_values[row_start:row_end]
            model_inputs["image_grid_thw"] = image_grid_thw[img_start:img_end]
        elif image_position_ids is not None and pixel_values is not None:
            model_inputs["pixel_values"] = pixel_values[img_start:img_end]
            model_inputs["image_position_ids"] = image_position_ids[img_start:img_end]
        elif spatial_shapes is not None and pixel_values is not None:
            cum_tiles = torch.tensor([0] + num_tiles).cumsum(0)
            tile_start, tile_end = (cum_tiles[start], cum_tiles[end])
            model_inputs["pixel_values"] = pixel_values[tile_start:tile_end]
            model_inputs["pixel_attention_mask"] = pixel_attention_mask[tile_start:tile_end]
            model_inputs["spatial_shapes"] = spatial_shapes[tile_start:tile_end]
        elif num_tiles is not None and pixel_values is not None:
            cum_tiles = torch.tensor([0] + num_tiles).cumsum(0)
            tile_start, tile_end = (cum_tiles[start], cum_tiles[end])
            model_inputs["pixel_values"] = pixel_values[tile_start:tile_end]
        elif pixel_values is not None and pixel_values.size(0) == sum(num_images):
            model_inputs["pixel_values"] = pixel_values[img_start:img_end]
        elif pixel_values is not None:
            model_inputs["pixel_values"] = pixel_values[start:end]
        if pixel_attention_mask is not None and spatial_shapes is None:
            model_inputs["pixel_attention_mask"] = pixel_attention_mask[start:end]
        if image_sizes is not None:
            model_inputs["image_sizes"] = image_sizes[img_start:img_end]
        if token_type_ids is not None:
            model_inputs["token_type_ids"] = token_type_ids[start:end]
        if mm_token_type_ids is not None:
            model_inputs["mm_token_type_ids"] = mm_token_type_ids[start:end]
        if compute_aux_loss:
            model_inputs["output_router_logits"] = True
        labels = input_ids_batch.masked_fill(attention_mask_batch == 0, -100)
        labels[:, :-logits_to_keep] = -100
        with self.accelerator.autocast():
            outputs = model(**model_inputs, labels=labels, fused_lm_head=True)
        all_logps.append(outputs.log_probs[:, -logits_to_keep:])
        if compute_entropy:
            all_entropies.append(outputs.entropy[:, -logits_to_keep:])
        if compute_aux_loss:
            all_aux_losses.append(outputs.aux_loss)
    logps = torch.cat(all_logps, dim=0)
    entropies = torch.cat(all_entropies, dim=0) if compute_entropy else None
    aux_loss = torch.stack(all_aux_losses).mean() if compute_aux_loss else None
    return (logps, entropies, aux_loss)
