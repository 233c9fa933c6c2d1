"""What runs a model: the protocol that the runner calls, and the table of architectures."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.batch import ForwardBatch
from engine.kernels.base import Kernels
from engine.layers.context import KV
from engine.models.spec import ModelSpec
from engine.models.weights import Weights
from engine.registry import Registry


class Model(Protocol):
    """A decoder on one rank. Inference only; call it under torch.inference_mode()."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        kernels: Kernels,
        attention: type[AttentionBackend],
        block_size: int,
        max_model_len: int,
    ) -> None: ...

    def forward(self, batch: ForwardBatch, kv: KV) -> Tensor:
        """Hidden states after the last norm, [T, hidden]. Writes the batch's keys and values into `kv`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden` [R, hidden] -> [R, vocab] float32, the same on every rank. The caller may overwrite it."""


_LLAMA = "engine.models.llama:LlamaModel"
MODELS: Registry[Model] = Registry(
    "architecture", dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"), _LLAMA)
)
