"""All settings of one engine. Frozen; an unknown or impossible value is an error at load time."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine; keys are vLLM's where they mean the same.

    `model`: directory with safetensors, a .gguf file, or `pkg://package/file`. `device` auto takes CUDA when
    there is one. `dtype` auto is bfloat16 on CUDA; on the CPU it is float32 for GGUF files (their weights
    stay quantized) and the checkpoint's own dtype otherwise. `kv_cache_dtype` auto is `dtype`, but float16 for
    GGUF files on the CPU in float32.
    `num_kv_blocks` None: as many as fit `kv_cache_memory` bytes (None: gpu_memory_utilization of a GPU's
    memory, or 1 GiB on the CPU). `max_num_batched_tokens` is the token budget of a step. `seed` seeds requests
    that bring none. `num_threads` None: one per core. `stand_in_step_ms`: what a step of executor "stand_in", which
    has no model, takes.
    """

    model: str
    tokenizer: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    attention_backend: str = "auto"
    executor: str = "local"
    tensor_parallel_size: int = 1
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_num_waiting: int = 4096
    scheduling_policy: str = "fcfs"
    seed: int = 0
    num_threads: int | None = None
    stand_in_step_ms: float = 30.0

    def __post_init__(self) -> None:
        for name, low in _MINIMA.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name} must be at least {low}, got {value}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.kv_cache_dtype not in DTYPES:
            raise ConfigError(f"kv_cache_dtype must be one of {', '.join(DTYPES)}, got {self.kv_cache_dtype!r}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")


_MINIMA = {
    "tensor_parallel_size": 1,
    "block_size": 1,
    "num_kv_blocks": 1,
    "kv_cache_memory": 1,
    "max_model_len": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_num_waiting": 0,
    "num_threads": 1,
    "stand_in_step_ms": 0.0,
}
