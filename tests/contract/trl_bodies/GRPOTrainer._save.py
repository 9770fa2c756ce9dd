# An excerpt of transformers 5.23.0, transformers.trainer: copyright The HuggingFace Team, licensed
# under the Apache License, Version 2.0. Changed: no comments, no docstrings, another layout.

def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
    output_dir = output_dir if output_dir is not None else self.args.output_dir
    if not self.args.should_save and (not self.is_distributed_loading_by_transformers):
        return
    if self.args.should_save:
        os.makedirs(output_dir, exist_ok=True)
        logger.info(f"Saving model checkpoint to {output_dir}")
    supported_classes = (PreTrainedModel,) if not is_peft_available() else (PreTrainedModel, PeftModel)
    if not isinstance(self.model, supported_classes):
        if state_dict is None:
            state_dict = self.model.state_dict()
        if isinstance(self.accelerator.unwrap_model(self.model, keep_torch_compile=False), supported_classes):
            self.accelerator.unwrap_model(self.model, keep_torch_compile=False).save_pretrained(
                output_dir, state_dict=state_dict, is_main_process=self.args.should_save
            )
        elif self.args.should_save:
            logger.info("Trainer.model is not a `PreTrainedModel`, only saving its state dict.")
            safetensors.torch.save_file(
                state_dict, os.path.join(output_dir, SAFE_WEIGHTS_NAME), metadata={"format": "pt"}
            )
    else:
        self.model.save_pretrained(output_dir, state_dict=state_dict, is_main_process=self.args.should_save)
    if not self.args.should_save:
        return
    if self.processing_class is not None:
        self.processing_class.save_pretrained(output_dir)
    elif (
        self.data_collator is not None
        and hasattr(self.data_collator, "tokenizer")
        and (self.data_collator.tokenizer is not None)
    ):
        logger.info("Saving Trainer.data_collator.tokenizer by default as Trainer.processing_class is `None`")
        self.data_collator.tokenizer.save_pretrained(output_dir)
    torch.save(self.args, os.path.join(output_dir, TRAINING_ARGS_NAME))
