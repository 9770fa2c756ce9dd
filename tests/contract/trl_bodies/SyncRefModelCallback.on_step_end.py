# An excerpt of trl 1.16.0, trl.trainer.callbacks: copyright The HuggingFace Team, licensed
# under the Apache License, Version 2.0. Changed: no comments, no docstrings, another layout.

def on_step_end(self, args, state, control, **kwargs):
    model: PreTrainedModel = kwargs["model"]
    if self.ref_model is not None and state.global_step % args.ref_model_sync_steps == 0:
        if self.accelerator:
            model = self.accelerator.unwrap_model(model)
        self.sync_target_model(model, self.ref_model, args.ref_model_mixup_alpha)
