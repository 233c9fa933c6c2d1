"""Models: files become specs and weights, specs and weights become something that runs.

locate finds the files, checkpoint opens them (gguf_file, safetensors_dir), spec holds the numbers (from spec_hf or
spec_gguf), loader brings the weights in, llama computes. To add an architecture of another shape: a class that follows
Model, and its line in MODELS.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from engine.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from engine.attention.base import AttentionBackend
    from engine.kernels.base import Kernels
    from engine.layers.context import KV
    from engine.models.loader import Weights
    from engine.models.spec import ModelSpec
    from engine.runner.batch import ForwardBatch


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
        """hidden [R, hidden] -> [R, vocab] float32, the same on every rank. The caller may overwrite it."""


_LLAMA = "engine.models.llama:LlamaModel"
MODELS: Registry[Model] = Registry(
    "architecture", dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"), _LLAMA)
)
