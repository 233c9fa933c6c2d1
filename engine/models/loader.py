"""From an opened checkpoint to a model that runs."""

from __future__ import annotations

from engine.attention.base import AttentionBackend
from engine.errors import ConfigError
from engine.kernels.base import Kernels
from engine.models.base import MODELS, Model
from engine.models.checkpoint import Checkpoint
from engine.models.spec import ModelSpec
from engine.models.weights import Weights


def check_heads(spec: ModelSpec, ranks: int) -> None:
    """Attention is cut by whole heads. Raises ConfigError naming the heads that do not divide."""
    for what, count in (("attention heads", spec.num_heads), ("KV heads", spec.num_kv_heads)):
        if count % ranks:
            raise ConfigError(
                f"tensor_parallel_size {ranks} does not divide the model's {count} {what}; "
                f"possible: {', '.join(str(n) for n in range(1, count + 1) if _divides(spec, n))}"
            )


def load_model(
    checkpoint: Checkpoint,
    weights: Weights,
    kernels: Kernels,
    attention: type[AttentionBackend],
    block_size: int,
    max_model_len: int,
) -> Model:
    """Read every weight and build the rank's model. Raises ModelFileError or ConfigError."""
    check_heads(checkpoint.spec, weights.group.size)
    cls = MODELS.get(checkpoint.spec.architecture)
    return cls(checkpoint.spec, weights, kernels, attention, block_size, max_model_len)


def _divides(spec: ModelSpec, ranks: int) -> bool:
    return spec.num_heads % ranks == 0 and spec.num_kv_heads % ranks == 0
