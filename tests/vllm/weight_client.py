"""The trainer's side of sending weights through a file; `file_transfer.py` is the server's."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from trl.generation.vllm_client import VLLMClient

from sorl_trl.trainers.vllm_policy import WeightClient


class FileTransfer(VLLMClient):
    """TRL's client, but weights go through a file: in memory, or in the folder that `TMPDIR` names."""

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        self._post(f"{self.base_url}/init_weight_transfer_engine", json={"init_info": {}})

    def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
        memory = "/dev/shm" if "TMPDIR" not in os.environ else None
        with tempfile.TemporaryDirectory(prefix="sorl-weights-", dir=memory) as name:
            path = Path(name) / "weights.safetensors"
            save_file({name: value.to("cpu", copy=True).contiguous() for name, value in named_params}, path)
            self._start_weight_update()
            try:
                self._post(f"{self.base_url}/update_weights", json={"update_info": {"path": str(path)}})
            finally:
                self._finish_weight_update()


class FileWeightClient(WeightClient, FileTransfer):
    """The trainers' client, whose `super()` is the transfer through a file."""
