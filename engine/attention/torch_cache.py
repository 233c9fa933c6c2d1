"""What both backends in torch share: how they read and write the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.base import AttentionShape
from engine.attention.kv_codec import decode, encode
from engine.kernels.base import Kernels
from engine.kv.storage import SCALED_DTYPES, LayerKV


class TorchAttention:
    """The part of a backend in torch that does not depend on how rows are put together."""

    def __init__(self, shape: AttentionShape, block_size: int, kernels: Kernels | None = None) -> None:
        self.shape = shape
        self.block_size = block_size

    @staticmethod
    def keys_by_feature(block_size: int) -> bool:
        """See AttentionBackend.keys_by_feature()."""
        return False


def store(k: Tensor, v: Tensor, kv: LayerKV, slots: Tensor) -> None:
    """Write k and v [T, KVH, D], and their scales if the cache has any, at slots [T]."""
    new_parts = _as_stored(k, v, kv)
    for cache, new in zip(kv[: len(new_parts)], new_parts, strict=True):
        flat = cache.view(-1, *cache.shape[2:])
        flat.view(_word(flat)).index_copy_(0, slots, new.view(_word(flat)))


def load(kv: LayerKV, slots: Tensor) -> tuple[Tensor, Tensor]:
    """K and V [n, KVH, D] at slots [n]."""
    flat = [cache.view(-1, *cache.shape[2:]) for cache in kv]
    return as_floats([cache.view(_word(cache)).index_select(0, slots).view(cache.dtype) for cache in flat])


def _as_stored(k: Tensor, v: Tensor, kv: LayerKV) -> tuple[Tensor, ...]:
    """What goes into the cache: K, V and their scales, if it has any that are not given."""
    dtype = kv[0].dtype
    if dtype not in SCALED_DTYPES:
        return k.to(dtype), v.to(dtype)
    given = [scales[0, 0] if not any(scales.stride()) else None for scales in kv[2:]]
    (keys, key_scales), (values, value_scales) = (encode(x, dtype, s) for x, s in zip((k, v), given, strict=True))
    return (keys, values, key_scales, value_scales) if given[0] is None else (keys, values)


def as_floats(stored: list[Tensor]) -> tuple[Tensor, Tensor]:
    """K and V of what a cache holds: two tensors, or four with scales, each [n, ...]."""
    if len(stored) == 2:
        return stored[0], stored[1]
    keys, values, key_scales, value_scales = stored
    return decode(keys, key_scales), decode(values, value_scales)


def _word(cache: Tensor) -> torch.dtype:
    """The type to copy by: torch does not index float8."""
    return torch.uint8 if cache.dtype in SCALED_DTYPES else cache.dtype
