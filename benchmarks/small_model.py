"""For benchmarks of time and memory: a random Llama whose tokens are numbers, and how many bytes tensors hold."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def build_model(
    hidden_size: int, layers: int, vocabulary: int, kind: type[LlamaForCausalLM] = LlamaForCausalLM, **options: Any
) -> LlamaForCausalLM:
    """Always the same weights; attention heads of 64. Token 0 pads and token 1 ends a text, or as `options` say."""
    torch.manual_seed(0)
    fields = {
        "vocab_size": vocabulary,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden_size // 64,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    return kind(LlamaConfig(**{**fields, **options}))


def build_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """The number of a token is its text."""
    words = Tokenizer(models.WordLevel({str(i): i for i in range(vocabulary)}, unk_token="2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", padding_side="left")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of `tensors`, and of all that operations make within it, while they live: exact where a
    process's resident memory is noisy.

    What an operation allocates and frees within itself is not seen.

    Args:
        tensors: made before, such as a model's parameters.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: set[int] = set()
        for tensor in tensors:
            self._count(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return output

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()  # one for all views of it
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._alive.remove(key)
        self.now -= size
