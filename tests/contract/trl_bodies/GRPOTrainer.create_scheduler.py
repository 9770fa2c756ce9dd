# An excerpt of transformers 5.23.0, transformers.trainer: copyright The HuggingFace Team, licensed
# under the Apache License, Version 2.0. Changed: no comments, no docstrings, another layout.

def create_scheduler(
    self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
) -> torch.optim.lr_scheduler.LRScheduler:
    if self.lr_scheduler is None:
        if optimizer is None:
            if is_sagemaker_mp_enabled() and smp.state.cfg.fp16:
                optimizer = self.optimizer.optimizer
            else:
                optimizer = self.optimizer
        self.lr_scheduler = get_scheduler(
            self.args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=self.args.get_warmup_steps(num_training_steps),
            num_training_steps=num_training_steps,
            scheduler_specific_kwargs=self.args.lr_scheduler_kwargs,
        )
        self._created_lr_scheduler = True
    return self.lr_scheduler
