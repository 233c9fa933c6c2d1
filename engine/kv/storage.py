"""Where keys and values live: one pair of tensors per layer, and how many blocks of them fit."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv.scales import KVScales
from engine.kv.window import KVWindow
from engine.machine import free_memory

log = logging.getLogger(__name__)

DEFAULT_CPU_BYTES = 1 << 30  # holds some 20,000 tokens of a 3B model; prefixes seldom need more
_CPU_SHARE = 0.5  # of the memory that is free; the rest is for the steps' own buffers, gateways, and others
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The largest code of the types that need scales."""
SCALED_DTYPES = frozenset(LARGEST)
SCALE_DTYPE = torch.bfloat16
"""Of one head of one token. It has float32's range, so that no scale overflows; its own rounding costs nothing, for
what is stored is divided by the rounded scale."""

LayerKV = tuple[Tensor, ...]
"""One layer's K and V, each [num_blocks, block_size, num_kv_heads, head_dim]; of a scaled dtype also the scales of
each, [num_blocks, block_size, num_kv_heads]: these are given and not to be written if all their strides are 0."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of one rank's cache. num_kv_heads counts the rank's own heads. `keys_by_feature`: in
    memory the heads of a block come one after the other, and the keys of a head feature by feature.

    Scales belong to a token's head rather than to a layer: so blocks need nothing beside them to be read, wherever
    they are copied, and a token with outliers costs the precision of no other. Unless `scales` are given: then
    every layer has one for its K and one for its V, which take no memory."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    keys_by_feature: bool = False
    scales: KVScales | None = None

    @property
    def bytes_per_block(self) -> int:
        """K and V of one block in every layer, and their scales."""
        of_head = self.head_dim * self.dtype.itemsize + (
            SCALE_DTYPE.itemsize if self.scaled and self.scales is None else 0
        )
        return 2 * self.num_layers * self.block_size * self.num_kv_heads * of_head

    @property
    def scaled(self) -> bool:
        """Whether the type needs scales."""
        return self.dtype in SCALED_DTYPES


class KVStorage:
    """The cache of one rank, layer by layer.

    Zeroed on creation: on the CPU that costs nothing until a block is first written, and no block ever
    holds NaN left by someone else.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        heads, size, dim = layout.num_kv_heads, layout.block_size, layout.head_dim

        def zeros(*shape: int, dtype: torch.dtype = layout.dtype) -> Tensor:
            return torch.zeros(num_blocks, *shape, dtype=dtype, device=device)

        def keys() -> Tensor:
            return zeros(heads, dim, size).permute(0, 3, 1, 2) if layout.keys_by_feature else zeros(size, heads, dim)

        def values() -> Tensor:
            return zeros(heads, size, dim).transpose(1, 2) if layout.keys_by_feature else zeros(size, heads, dim)

        def scales() -> Tensor:
            if layout.keys_by_feature:
                return zeros(heads, size, dtype=SCALE_DTYPE).transpose(1, 2)
            return zeros(size, heads, dtype=SCALE_DTYPE)

        def given(largest: float) -> Tensor:
            scale = torch.tensor(largest / LARGEST[layout.dtype], dtype=SCALE_DTYPE, device=device)
            return scale.expand(num_blocks, size, heads)

        def layer(index: int) -> LayerKV:
            if not layout.scaled:
                return keys(), values()
            if layout.scales is None:
                return keys(), values(), scales(), scales()
            return keys(), values(), given(layout.scales.keys[index]), given(layout.scales.values[index])

        self.layers: tuple[LayerKV, ...] = tuple(layer(i) for i in range(layout.num_layers))

    @property
    def by_block(self) -> tuple[LayerKV, ...]:
        """The tensors of `layers` that every block has a part of its own in."""
        return tuple(tuple(t for t in layer if t.stride(0)) for layer in self.layers)


@dataclass(frozen=True, slots=True)
class CacheSize:
    """How many blocks there are, and how many tokens one sequence may have."""

    num_blocks: int
    max_model_len: int


def size_cache(
    config: EngineConfig,
    layout: KVLayout,
    longest: int,
    device: torch.device,
    window: KVWindow | None = None,
    reserved: int = 0,
) -> CacheSize:
    """The size of the cache. `longest`: the tokens that a sequence may have by the model and the settings. `reserved`:
    bytes of host memory that are still to be taken by others.

    An explicit num_kv_blocks is taken as it is, however small: requests that cannot fit are refused one by one. A cache
    sized from memory holds one sequence of `longest` tokens. Where there is too little memory for that, sequences are
    as long as fits; if max_model_len was set, ConfigError is raised with the numbers.

    On CUDA to be called after the weights are loaded and warmed up: what they use is what is not free.
    """
    if config.num_kv_blocks is not None:
        return CacheSize(config.num_kv_blocks, longest)
    needed = -(-longest // layout.block_size)
    if window is not None:
        needed = min(needed, window.least_blocks(layout.block_size))
    memory = _memory_for(config, device, needed * layout.bytes_per_block, reserved)
    blocks = memory // layout.bytes_per_block
    if blocks >= needed:
        return CacheSize(blocks, longest)
    if config.max_model_len is not None or not blocks:
        raise ConfigError(
            f"the KV cache gets {memory} bytes = {blocks} blocks of {layout.block_size} tokens "
            f"({layout.bytes_per_block} bytes each), but one sequence of max_model_len {longest} needs "
            f"{needed} blocks = {needed * layout.bytes_per_block} bytes; raise kv_cache_memory or lower max_model_len"
        )
    fitting = blocks * layout.block_size
    log.warning(
        "sequences have at most %d tokens: the KV cache gets %d bytes, and the model's %d tokens would need %d",
        fitting,
        memory,
        longest,
        needed * layout.bytes_per_block,
    )
    return CacheSize(blocks, fitting)


def _memory_for(config: EngineConfig, device: torch.device, needed: int, reserved: int) -> int:
    """Bytes for the cache. `needed`: for one longest sequence."""
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    if device.type != "cuda":
        usual, free = max(DEFAULT_CPU_BYTES, needed), free_memory()
        return usual if free is None else min(usual, int(max(0, free - reserved) * _CPU_SHARE))
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * config.gpu_memory_utilization) - (total - free))
