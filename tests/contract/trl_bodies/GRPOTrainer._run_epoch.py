# An excerpt of transformers 5.23.0, transformers.trainer: copyright The HuggingFace Team, licensed
# under the Apache License, Version 2.0. Changed: no comments, no docstrings, another layout.

def _run_epoch(
    self,
    model,
    epoch,
    train_dataloader,
    steps_in_epoch,
    num_update_steps_per_epoch,
    trial,
    ignore_keys_for_eval,
    start_time,
    resume_from_checkpoint,
    epochs_trained,
    steps_trained_in_current_epoch,
):
    step = -1
    grad_norm = None
    learning_rate = None
    rng_to_sync = False
    num_update_steps_trained = 0
    if epoch == epochs_trained and resume_from_checkpoint is not None:
        if steps_trained_in_current_epoch > 0 and (not self.args.ignore_data_skip):
            train_dataloader = skip_first_batches(train_dataloader, steps_trained_in_current_epoch)
            step = steps_trained_in_current_epoch - 1
            num_update_steps_trained = steps_trained_in_current_epoch // self.args.gradient_accumulation_steps
            rng_to_sync = True
        elif steps_trained_in_current_epoch == 0:
            self._load_rng_state(resume_from_checkpoint)
    if hasattr(train_dataloader, "set_epoch"):
        train_dataloader.set_epoch(epoch)
    shard_wrapper = getattr(train_dataloader, "batch_sampler", None)
    underlying_sampler = getattr(shard_wrapper, "batch_sampler", None)
    if hasattr(underlying_sampler, "set_epoch"):
        underlying_sampler.set_epoch(epoch)
    epoch_iterator = iter(train_dataloader)
    remainder = steps_in_epoch % self.args.gradient_accumulation_steps
    if remainder == 0:
        remainder = self.args.gradient_accumulation_steps
    for update_step in range(num_update_steps_trained, num_update_steps_per_epoch):
        num_batches = (
            self.args.gradient_accumulation_steps if update_step != num_update_steps_per_epoch - 1 else remainder
        )
        batch_samples, num_items_in_batch = self.get_batch_samples(epoch_iterator, num_batches, self.args.device)
        self.current_gradient_accumulation_steps = len(batch_samples)
        if rng_to_sync:
            self._load_rng_state(resume_from_checkpoint)
            rng_to_sync = False
        for i, inputs in enumerate(batch_samples):
            step += 1
            do_sync_step = (step + 1) % self.args.gradient_accumulation_steps == 0 or step + 1 == steps_in_epoch
            self.accelerator.gradient_state._set_sync_gradients(do_sync_step)
            if step % self.args.gradient_accumulation_steps == 0:
                self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
            if (
                self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
                or self.accelerator.distributed_type == DistributedType.DEEPSPEED
                or i == len(batch_samples) - 1
            ):
                sync_context = contextlib.nullcontext
            elif self.is_distributed_loading_by_transformers and is_fsdp_managed_module(self.model):
                sync_context = self._defer_fsdp_gradient_reduction
            else:
                sync_context = functools.partial(self.accelerator.no_sync, model=model)
            with sync_context():
                tr_loss_step = self.training_step(model, inputs, num_items_in_batch)
            if (
                self.args.logging_nan_inf_filter
                and (not is_torch_xla_available())
                and (torch.isnan(tr_loss_step) or torch.isinf(tr_loss_step))
            ):
                self._tr_loss += self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
            else:
                if self._tr_loss.device != tr_loss_step.device:
                    raise ValueError(
                        f"Calculated loss must be on the original device: {self._tr_loss.device} but device in use is {tr_loss_step.device}"
                    )
                self._tr_loss += tr_loss_step
            self.current_flos += float(self.floating_point_ops(inputs))
            self._track_num_input_tokens(inputs)
            if do_sync_step:
                grad_norm = None
                if self.args.max_grad_norm > 0:
                    grad_norm = self._clip_grad_norm(model)
                grad_norm = self._get_grad_norm(model, grad_norm=grad_norm)
                self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
                self.optimizer.step()
                self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
                learning_rate = self._get_learning_rate()
                if not self.accelerator.optimizer_step_was_skipped:
                    if not isinstance(self.lr_scheduler, (torch.optim.lr_scheduler.ReduceLROnPlateau, GreedyLR)):
                        self.lr_scheduler.step()
                model.zero_grad()
                self.state.global_step += 1
                self.state.epoch = epoch + (step + 1) / steps_in_epoch
                self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
                self._maybe_log_save_evaluate(
                    self._tr_loss,
                    grad_norm,
                    model,
                    trial,
                    epoch,
                    ignore_keys_for_eval,
                    start_time,
                    learning_rate=learning_rate,
                )
            else:
                self.control = self.callback_handler.on_substep_end(self.args, self.state, self.control)
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
        if self.control.should_epoch_stop or self.control.should_training_stop:
            break
    if is_torch_xla_available():
        xm.mark_step()
    if step < 0:
        logger.warning(
            f"There seems not to be a single sample in your epoch_iterator, stopping training at step {self.state.global_step}! This is expected if you're using an IterableDataset and set num_steps ({self.state.max_steps}) higher than the number of available samples."
        )
        self.control.should_training_stop = True
    self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
    self._maybe_log_save_evaluate(
        self._tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=learning_rate
    )
