"""TRL's client of a vLLM server, which changes weights while turns are under way, by NCCL or through a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

from sorl_trl.trainers.agents.vllm.connection import EngineUnavailable

_IN_MEMORY = Path("/dev/shm")


class WeightClient(VLLMClient):
    """Pauses the server while its weights change: turns that it is generating go on with the new ones.

    vLLM's pause keeps them, and drops what they and the prefix cache hold of the old weights. The version that the
    server says in `/weight_info` counts the updates, so that one that was started anew can be told.

    Where the server was started with the weight-transfer backend "file" (`sorl_trl.vllm_weights`), weights go through
    a file: in the memory of the machine where it has `/dev/shm`, else in the folder for temporary files. `TMPDIR`
    names another one, which both must see.
    """

    version = 0
    """Updates that the server has had from this client."""

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        transfer = self.get_server_info()["weight_transfer_config"]
        self._through_file = transfer is not None and transfer["backend"] == "file"
        if self._through_file:
            self._post(f"{self.base_url}/init_weight_transfer_engine", json={"init_info": {}})
        else:
            super().init_communicator(device)

    def update_named_params(
        self, metadata: Sequence[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        try:
            self._update(metadata, named_params)
        except Exception:
            for _ in named_params:  # the other processes gather the rest of sharded parameters
                pass
            raise

    def _update(
        self, metadata: Sequence[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        if self.version and (has := self._get(f"{self.base_url}/weight_info")["weight_version"]) != str(self.version):
            raise EngineUnavailable(
                f"The vLLM server at {self.base_url} has the weights {has!r}, not '{self.version}', which it was sent "
                "last: it was started anew, or another trainer uses it"
            )
        with ExitStack() as stack:
            path = stack.enter_context(_written(named_params)) if self._through_file else None
            stack.callback(self._post, f"{self.base_url}/resume")  # also where the update fails
            self._post(f"{self.base_url}/pause", params={"mode": "keep"})
            if path is None:
                super().update_named_params(metadata, named_params)
                return
            self._start_weight_update()
            try:
                self._post(f"{self.base_url}/update_weights", json={"update_info": {"path": str(path)}})
            finally:
                self._finish_weight_update()

    def _finish_weight_update(self) -> None:
        self.version += 1
        self._post(f"{self.base_url}/finish_weight_update", json={"weight_version": str(self.version)})

    def reset_prefix_cache(self) -> None:
        """The pause has done it: while turns are under way, nothing else could."""


@contextmanager
def _written(named_params: Iterator[tuple[str, torch.Tensor]]) -> Iterator[Path]:
    """Weights in a file, for as long as the context lasts."""
    from safetensors.torch import save_file

    folder = None if "TMPDIR" in os.environ or not _IN_MEMORY.is_dir() else _IN_MEMORY
    with tempfile.TemporaryDirectory(prefix="sorl-weights-", dir=folder) as name:
        path = Path(name) / "weights.safetensors"
        save_file({name: value.to("cpu", copy=True).contiguous() for name, value in named_params}, path)
        yield path


@contextmanager
def weight_client() -> Iterator[None]:
    """Have TRL's `VLLMGeneration` make this client."""
    trls: Any = vllm_generation.VLLMClient
    vllm_generation.VLLMClient = WeightClient
    try:
        yield
    finally:
        vllm_generation.VLLMClient = trls
