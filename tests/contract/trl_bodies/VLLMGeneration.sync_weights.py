# An excerpt of trl 1.16.0, trl.generation.vllm_generation: copyright The HuggingFace Team, licensed
# under the Apache License, Version 2.0. Changed: no comments, no docstrings, another layout.

def sync_weights(self):
    if self.mode == "colocate" and self.enable_sleep_mode:
        empty_cache()
        self.llm.wake_up(tags=["weights"])
        self._llm_weights_sleeping = False
    accelerator = self.accelerator
    if self.mode == "server":
        if self._weight_metadata is None:
            self._weight_metadata = [
                (name, str(param.dtype).removeprefix("torch."), list(param.shape))
                for name, param in self._iter_named_params()
            ]
        if accelerator.is_main_process:
            self.vllm_client.update_named_params(self._weight_metadata, self._iter_named_params())
        else:
            for _ in self._iter_named_params():
                pass
    elif self.mode == "colocate":
        for name, param in self._iter_named_params():
            self.llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights([(name, param)])
    if self.mode == "server" and accelerator.is_main_process:
        self.vllm_client.reset_prefix_cache()
    elif self.mode == "colocate":
        self.llm.reset_prefix_cache()
