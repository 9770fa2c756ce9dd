# An excerpt of transformers 5.23.0, transformers.trainer: copyright The HuggingFace Team, licensed
# under the Apache License, Version 2.0. Changed: no comments, no docstrings, another layout.

def train(
    self,
    resume_from_checkpoint: str | bool | None = None,
    trial: "optuna.Trial | dict[str, Any] | None" = None,
    ignore_keys_for_eval: list[str] | None = None,
) -> TrainOutput:
    if resume_from_checkpoint is False:
        resume_from_checkpoint = None
    self._memory_tracker.start()
    args = self.args
    self.is_in_train = True
    if self.model_init is not None:
        enable_full_determinism(args.seed) if args.full_determinism else set_seed(args.seed)
        self.model = self.call_model_init(trial)
        self.optimizer, self.lr_scheduler = (None, None)
        if self.place_model_on_device:
            self._move_model_to_device(self.model, args.device)
        self.model_wrapped = self.model
    if self.args.use_liger_kernel:
        apply_liger_kernel(self.model, self.args.liger_kernel_config)
    if (args.fp16_full_eval or args.bf16_full_eval) and (not self.is_model_parallel) and (self.model_init is None):
        self._move_model_to_device(self.model, args.device)
    if args.activation_checkpointing:
        gc_kwargs = dict(args.activation_checkpointing_kwargs or {})
        every_n_layers = gc_kwargs.pop("every_n_layers", 1)
        offload = gc_kwargs.pop("offload", False)
        if hasattr(self.model, "activation_checkpointing_enable"):
            self.model.activation_checkpointing_enable(
                activation_checkpointing_kwargs=gc_kwargs or None, every_n_layers=every_n_layers, offload=offload
            )
        else:
            warnings.warn(
                f"`{type(self.model).__name__}` only defines `gradient_checkpointing_enable`, which is deprecated and will no longer be called in v6. Define `activation_checkpointing_enable` instead.",
                FutureWarning,
            )
            self.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs=gc_kwargs or None, every_n_layers=every_n_layers, offload=offload
            )
    if isinstance(self.processing_class, (PreTrainedTokenizerBase, ProcessorMixin)) and hasattr(self.model, "config"):
        align_special_tokens(self.model, self.processing_class)
    if self.neftune_noise_alpha is not None:
        self.neftune_hook_handle = activate_neftune(self.model, self.neftune_noise_alpha, self.accelerator)
    self._hp_search_setup(trial)
    if DebugOption.UNDERFLOW_OVERFLOW in args.debug:
        if args.n_gpu > 1:
            raise ValueError(
                "Currently --debug underflow_overflow is not supported under DP. Please use DDP with torchrun"
            )
        else:
            DebugUnderflowOverflow(self.model)
    if isinstance(resume_from_checkpoint, bool) and resume_from_checkpoint:
        resume_from_checkpoint = get_last_checkpoint(args.output_dir)
        if resume_from_checkpoint is None:
            raise ValueError(f"No valid checkpoint found in output directory ({args.output_dir})")
    if resume_from_checkpoint is not None:
        if not is_sagemaker_mp_enabled() and (not self.is_deepspeed_enabled) and (not self.is_fsdp_enabled):
            self._load_from_checkpoint(resume_from_checkpoint)
        state = TrainerState.load_from_json(os.path.join(resume_from_checkpoint, TRAINER_STATE_NAME))
        if state.train_batch_size is not None and args.auto_find_batch_size:
            self._train_batch_size = state.train_batch_size
    inner_training_loop = find_executable_batch_size(
        self._inner_training_loop, self._train_batch_size, args.auto_find_batch_size
    )
    ctx = suppress_progress_bars() if args.push_to_hub else contextlib.nullcontext()
    with ctx:
        return inner_training_loop(
            args=args,
            resume_from_checkpoint=resume_from_checkpoint,
            trial=trial,
            ignore_keys_for_eval=ignore_keys_for_eval,
        )
