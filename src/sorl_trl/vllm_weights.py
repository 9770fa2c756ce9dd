"""A plugin of vLLM: a server takes new weights from a file, where NCCL cannot bring them.

`vllm serve` finds it by this package's entry point `vllm.general_plugins`, once it is asked for:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs \
        --weight-transfer-config '{"backend": "file"}'

The trainer then writes its weights to a folder that both see, in memory where they share a machine. It must import
nothing else of this package: every process of vLLM loads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)


def register() -> None:
    """The entry point."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "file" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("file", FileWeightTransferEngine)


@dataclass
class FileUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A safetensors file with the names that `load_weights` knows."""

    path: str


class FileWeightTransferEngine(WeightTransferEngine[WeightTransferInitInfo, FileUpdate]):  # type: ignore[misc]
    """Loads all weights anew, layer by layer, and makes of them what vLLM made when it started."""

    init_info_cls = WeightTransferInitInfo  # nothing has to be agreed upon
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():  # the base class waits for one that a CPU does not have
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdate) -> None:
        from safetensors import safe_open

        with safe_open(update_info.path, framework="pt") as file:  # mapped: one tensor at a time is copied
            self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 - it is no dictionary

    def finish_weight_update(self) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        # A head that is tied to the embedding is loaded under no name of its own, and keeps what a CPU has packed.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead | VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        pass
