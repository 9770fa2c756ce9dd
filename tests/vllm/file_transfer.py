"""A server on a CPU reads new weights from a file, because NCCL does not deliver them there.

Its worker imports this module, as `--worker-extension-cls` tells it, and nothing else of the tests.
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
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """A safetensors file whose tensors have the names that `load_weights` expects."""

    path: str


class FileWeightTransferEngine(WeightTransferEngine[WeightTransferInitInfo, FileUpdate]):
    """Loads all weights again, layer by layer, and processes them as vLLM did when it started."""

    init_info_cls = WeightTransferInitInfo  # there is nothing to agree on
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():  # the base class synchronizes without asking, which fails on a CPU
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdate) -> None:
        from safetensors import safe_open

        with safe_open(update_info.path, framework="pt") as file:  # mapped: one tensor at a time is copied
            self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 - it is no dictionary

    def finish_weight_update(self) -> None:
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        # A head tied to the embedding has no name of its own to load by, so on a CPU it keeps the old packed weights.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead | VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)
            elif isinstance(module, RoutedExperts):  # packed when vLLM starts, but on a CPU not when it is updated
                module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)

    def shutdown(self) -> None:
        pass


class WorkerExtension:
    """Adds nothing to the worker."""


WeightTransferEngineFactory.register_engine("file", FileWeightTransferEngine)
