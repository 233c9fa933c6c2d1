"""What EngineConfig's "auto" and None mean for this model on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv.scales import KVScales, read_scales
from engine.kv.storage import SCALED_DTYPES
from engine.kv.window import KVWindow, widest
from engine.machine import usable_cores
from engine.models.checkpoint import Checkpoint
from engine.models.spec import ModelSpec

_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def resolve_device(config: EngineConfig) -> torch.device:
    """CUDA when there is one and nothing else is asked for. Raises ConfigError for a device that is not here."""
    has_cuda = torch.cuda.is_available()
    if config.device == "auto":
        return torch.device("cuda" if has_cuda else "cpu")
    try:
        device = torch.device(config.device)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:<index>, got {config.device!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {config.device!r} is not on this machine ({torch.cuda.device_count()} CUDA devices)")
    return device


def resolve_dtype(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """The type of float weights and of what they are multiplied with."""
    if config.dtype != "auto":
        return _dtype(config.dtype)
    if device.type == "cuda":
        return torch.bfloat16
    if checkpoint.source.is_file():  # GGUF: weights stay quantized, so a narrow type saves nothing
        return torch.float32
    return checkpoint.load("model.embed_tokens.weight").data.dtype


def resolve_kv_dtype(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> torch.dtype:
    """The type of the cache. Next to the rounding in a GGUF file's weights that to float16 is small, and half the
    bytes are half the time of a long context."""
    if config.kv_cache_dtype != "auto":
        return _FP8.get(config.kv_cache_dtype) or _dtype(config.kv_cache_dtype)
    quantized = checkpoint.source.is_file()
    return torch.float16 if device.type == "cpu" and quantized and dtype is torch.float32 else dtype


def resolve_kv_scales(config: EngineConfig, checkpoint: Checkpoint, kv_dtype: torch.dtype) -> KVScales | None:
    """The scales of an 8-bit cache; None: they are found as the cache is written.

    Raises ConfigError or, for the checkpoint's, ModelFileError.
    """
    if config.kv_scales == "dynamic":
        return None
    if kv_dtype not in SCALED_DTYPES:
        raise ConfigError(
            f"kv_scales {config.kv_scales!r} needs kv_cache_dtype int8, fp8_e4m3 or fp8_e5m2, "
            f"got {dtype_name(kv_dtype)}"
        )
    if config.kv_scales == "checkpoint":
        return checkpoint.kv_scales()
    return read_scales(Path(config.kv_scales), checkpoint.spec.num_layers)


def resolve_max_model_len(config: EngineConfig, checkpoint: Checkpoint) -> int:
    """Tokens that a sequence may have. Raises ConfigError for more than the model has positions for."""
    limit = checkpoint.spec.max_position
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len {config.max_model_len} is more than the model's {limit} positions")
    return config.max_model_len or limit


def with_attention(config: EngineConfig, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the windows that attention_window and attention_sinks say.

    Raises ConfigError for sinks without a window.
    """
    spec, limit = checkpoint.spec, config.attention_window
    if limit is None and not config.attention_sinks:
        return checkpoint
    windows = spec.layer_windows
    if limit is not None:
        windows = tuple(limit if own is None else min(own, limit) for own in windows)
    if not any(windows):
        raise ConfigError(
            f"attention_sinks {config.attention_sinks} needs a window: no layer of this model has one, and "
            "attention_window is not set"
        )
    spec = replace(spec, layer_windows=windows, attention_sinks=config.attention_sinks)
    content = f"{checkpoint.fingerprint}-window{limit}-sinks{config.attention_sinks}"
    return replace(checkpoint, spec=spec, fingerprint=content)


def kv_window(config: EngineConfig, spec: ModelSpec, max_model_len: int) -> KVWindow | None:
    """What is seen of a sequence by the layer that sees most; None: all of it."""
    size = widest(spec.layer_windows)
    if size is None or size >= max_model_len:
        return None
    return KVWindow(size, spec.attention_sinks, config.max_num_batched_tokens)


def check_quantization(config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Raises ConfigError unless the checkpoint is what `quantization` says: nothing is quantized on loading."""
    actual = "gguf" if checkpoint.source.is_file() else "none"
    if config.quantization not in ("auto", actual):
        raise ConfigError(
            f"quantization {config.quantization!r} does not fit {checkpoint.source}: it is {actual!r} (or use 'auto')"
        )


def num_host_slots(config: EngineConfig, bytes_per_block: int) -> int:
    """How many blocks of all ranks together fit host_kv_cache_gib. Raises ConfigError if that is too little for one."""
    size = config.host_kv_cache_bytes
    if 0 < size < bytes_per_block:
        raise ConfigError(f"host_kv_cache_gib gives {size} bytes, but one block needs {bytes_per_block}")
    return size // bytes_per_block


def num_disk_slots(config: EngineConfig, bytes_per_block: int) -> int:
    """How many blocks of all ranks together fit disk_kv_cache_gib. Raises ConfigError if that is too little for one."""
    size = int(config.disk_kv_cache_gib * (1 << 30))
    if 0 < size < bytes_per_block:
        raise ConfigError(f"disk_kv_cache_gib gives {size} bytes, but one block needs {bytes_per_block}")
    return size // bytes_per_block


def num_threads(config: EngineConfig) -> int:
    """Threads that compute: num_threads, or one for each core that this process may keep busy."""
    return config.num_threads or usable_cores()


def dtype_name(dtype: torch.dtype) -> str:
    """The type's name as EngineConfig spells it."""
    return next((name for name, known in _FP8.items() if known is dtype), str(dtype).removeprefix("torch."))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)  # EngineConfig allows nothing else
    return found
