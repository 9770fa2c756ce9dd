# An excerpt of trl 1.16.0, trl.trainer.grpo_trainer: copyright The HuggingFace Team, licensed
# under the Apache License, Version 2.0. Changed: no comments, no docstrings, another layout.

def _load_optimizer_and_scheduler(self, checkpoint):
    super()._load_optimizer_and_scheduler(checkpoint)
    if self.use_adaptive_entropy and checkpoint is not None:
        path = os.path.join(checkpoint, "entropy_ctrl_state.json")
        if os.path.exists(path):
            with open(path) as f:
                state = json.load(f)
            self.entropy_coef = state["entropy_coef"]
            self._last_world_entropy = state["last_world_entropy"]
