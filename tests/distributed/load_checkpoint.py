"""Load checkpoints with transformers and PEFT alone, and compare them with the weights that training ended with.

`python load_checkpoint.py CHECKPOINT WEIGHTS [CHECKPOINT WEIGHTS …]`
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM


def main(*paths: str) -> None:
    for checkpoint, weights in zip(paths[::2], paths[1::2], strict=True):
        check(checkpoint, weights)
    assert not {"sorl_trl", "trl", "deepspeed"} & set(sys.modules)


def check(checkpoint: str, weights: str) -> None:
    is_adapter = (Path(checkpoint) / "adapter_config.json").exists()
    model = (AutoPeftModelForCausalLM if is_adapter else AutoModelForCausalLM).from_pretrained(checkpoint)
    saved = dict(torch.load(weights))
    # DeepSpeed may train a base model in float32 that lies there in float64.
    loaded = {name: tensor.to(saved[name].dtype) for name, tensor in model.state_dict().items()}
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    model.generate(torch.tensor([[4, 5]]), max_new_tokens=2)


if __name__ == "__main__":
    main(*sys.argv[1:])
