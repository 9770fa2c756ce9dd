"""Sends the policy to a vLLM server while turns are under way, over NCCL or through a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from trl.generation.vllm_client import VLLMClient

from sorl_trl.agents.vllm.connection import EngineUnavailable

_IN_MEMORY = Path("/dev/shm")


class WeightClient(VLLMClient):  # type: ignore[misc]
    """Pauses the server while its weights change, so that turns under way continue with the new weights.

    vLLM's pause keeps these turns, and drops what they and the prefix cache computed with the old weights. The version
    in the server's `/weight_info` counts the updates, so a restarted server is noticed.

    If the server was started with the weight-transfer backend "file" (`sorl_trl.vllm_weights`), weights go through a
    file in `/dev/shm`, or in the folder for temporary files if there is no such device. `TMPDIR` names another folder,
    which both must see.
    """

    version = 0
    """The number of updates that this client has sent to the server."""

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
            for _ in named_params:  # take part while other processes gather the rest of sharded parameters
                pass
            raise

    def _update(
        self, metadata: Sequence[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        if self.version and (has := self._get(f"{self.base_url}/weight_info")["weight_version"]) != str(self.version):
            raise EngineUnavailable(
                f"The vLLM server at {self.base_url} has the weights {has!r}, but was last sent '{self.version}': it "
                "was restarted, or another trainer uses it"
            )
        with ExitStack() as stack:
            path = stack.enter_context(_written(named_params)) if self._through_file else None
            stack.callback(self._post, f"{self.base_url}/resume")  # even if the update fails
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
        """Nothing to do: the pause has reset it, and nothing else could while turns are under way."""


@contextmanager
def _written(named_params: Iterator[tuple[str, torch.Tensor]]) -> Iterator[Path]:
    """Within it, the weights are in a file."""
    from safetensors.torch import save_file

    folder = None if "TMPDIR" in os.environ or not _IN_MEMORY.is_dir() else _IN_MEMORY
    with tempfile.TemporaryDirectory(prefix="sorl-weights-", dir=folder) as name:
        path = Path(name) / "weights.safetensors"
        save_file({name: value.to("cpu", copy=True).contiguous() for name, value in named_params}, path)
        yield path
