# An excerpt of transformers 5.23.0, transformers.trainer: copyright The HuggingFace Team, licensed
# under the Apache License, Version 2.0. Changed: no comments, no docstrings, another layout.

def _load_scaler(self, checkpoint: str | None) -> None:
    if checkpoint is None:
        return
    checkpoint_file_exists = os.path.isfile(os.path.join(checkpoint, SCALER_NAME))
    if checkpoint_file_exists:
        if is_torch_xla_available():
            with warnings.catch_warnings(record=True) as caught_warnings:
                check_torch_load_is_safe()
                scaler_state = torch.load(os.path.join(checkpoint, SCALER_NAME), map_location="cpu", weights_only=True)
            reissue_pt_warnings(caught_warnings)
            xm.send_cpu_data_to_device(scaler_state, self.args.device)
            self.accelerator.scaler.load_state_dict(scaler_state)
        else:
            with warnings.catch_warnings(record=True) as caught_warnings:
                check_torch_load_is_safe()
                self.accelerator.scaler.load_state_dict(
                    torch.load(os.path.join(checkpoint, SCALER_NAME), weights_only=True)
                )
            reissue_pt_warnings(caught_warnings)
