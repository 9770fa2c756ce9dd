# An excerpt of transformers 5.23.0, transformers.trainer: copyright The HuggingFace Team, licensed
# under the Apache License, Version 2.0. Changed: no comments, no docstrings, another layout.

def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
    delay_optimizer_creation = is_sagemaker_mp_enabled() or self.is_fsdp_xla_enabled or self.is_fsdp_enabled
    is_fsdp2 = self.is_fsdp_enabled and getattr(self.accelerator.state.fsdp_plugin, "fsdp_version", 1) == 2
    if is_fsdp2:
        delay_optimizer_creation = False
    if self._created_lr_scheduler:
        self.lr_scheduler = None
        self._created_lr_scheduler = False
    if self.is_deepspeed_enabled:
        self.optimizer, self.lr_scheduler = deepspeed_init(self, num_training_steps=max_steps)
    if not delay_optimizer_creation:
        self.create_optimizer()
    model = self._wrap_model(self.model_wrapped)
    use_accelerator_prepare = model is self.model
    if self.is_distributed_loading_by_transformers:
        model = self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        self.optimizer = self.accelerator.prepare(self.optimizer)
        self._sync_replicated_trainable_parameters(model)
    elif use_accelerator_prepare:
        if delay_optimizer_creation:
            if self.is_fsdp_enabled and _is_peft_model(self.model):
                update_fsdp_plugin_peft(self.model, self.accelerator)
            model = self.accelerator.prepare(self.model)
            self.create_optimizer(model)
            self.optimizer = self.accelerator.prepare(self.optimizer)
        elif self.is_deepspeed_enabled and type(self.lr_scheduler).__name__ == "DummyScheduler":
            model, self.optimizer, self.lr_scheduler = self.accelerator.prepare(
                self.model, self.optimizer, self.lr_scheduler
            )
        else:
            model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
    else:
        self.optimizer = self.accelerator.prepare(self.optimizer)
    self.create_scheduler(num_training_steps=max_steps)
    self.model_wrapped = model
    if self.is_fsdp_enabled or self.is_fsdp_xla_enabled:
        self.model = self.model_wrapped = model
    if self.is_deepspeed_enabled:
        self.deepspeed = self.model_wrapped
    if self.is_fsdp_enabled:
        if hasattr(self.model, "generate"):
            dist.fsdp.register_fsdp_forward_method(self.model, "generate")
    pc = getattr(self.accelerator, "parallelism_config", None)
    if pc is not None and pc.sp_backend == "deepspeed" and pc.sp_enabled:
        train_dataloader = self.accelerator.deepspeed_ulysses_dl_adapter(train_dataloader, model)
    if resume_from_checkpoint is not None:
        if self.is_deepspeed_enabled:
            deepspeed_load_checkpoint(
                self.model_wrapped, resume_from_checkpoint, load_module_strict=not _is_peft_model(self.model)
            )
        elif is_sagemaker_mp_enabled() or self.is_fsdp_enabled:
            self._load_from_checkpoint(resume_from_checkpoint, self.model_wrapped)
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        self._load_scaler(resume_from_checkpoint)
    for attr in ("model", "optimizer", "lr_scheduler"):
        setattr(self.callback_handler, attr, getattr(self, attr))
    self.callback_handler.train_dataloader = train_dataloader
    return (model, train_dataloader)
