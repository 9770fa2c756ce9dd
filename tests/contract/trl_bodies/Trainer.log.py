# An excerpt of transformers 5.23.0, transformers.trainer: copyright The HuggingFace Team, licensed
# under the Apache License, Version 2.0. Changed: no comments, no docstrings, another layout.

def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
    if self.state.epoch is not None:
        logs["epoch"] = self.state.epoch
    if self.args.include_num_input_tokens_seen != "no":
        logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
        if start_time is not None:
            current_session_num_tokens = self.state.num_input_tokens_seen - self._initial_num_input_tokens_seen
            logs.update(speed_metrics("train", start_time, num_tokens=current_session_num_tokens))
    output = {**logs, "step": self.state.global_step}
    self.state.log_history.append(output)
    self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)
