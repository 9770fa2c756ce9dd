# An excerpt of trl 1.16.0, trl.trainer.grpo_trainer: copyright The HuggingFace Team, licensed
# under the Apache License, Version 2.0. Changed: no comments, no docstrings, another layout.

@profiling_decorator
def _prepare_inputs(self, generation_batch: dict[str, torch.Tensor | Any]) -> dict[str, torch.Tensor | Any]:
    mode = "train" if self.model.training else "eval"
    if mode == "train":
        generate_every = self.args.steps_per_generation * self.num_iterations
        if self._step % generate_every == 0 or self._buffered_inputs is None:
            generation_batch = self._generate_and_score_completions(generation_batch)
            generation_batch = split_pixel_values_by_grid(generation_batch)
            generation_batch = shuffle_sequence_dict(generation_batch)
            generation_batches = split_tensor_dict(generation_batch, self.args.steps_per_generation)
            self._buffered_inputs = [unsplit_pixel_values_by_grid(batch) for batch in generation_batches]
        inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
    else:
        inputs = self._generate_and_score_completions(generation_batch)
    return inputs
