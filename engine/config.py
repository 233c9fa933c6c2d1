"""All settings of one engine. Frozen; an unknown or impossible value is an error at load time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "fp8_e4m3", "fp8_e5m2", "int8")
PREEMPTION_MODES = ("auto", "swap", "recompute")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine; keys are vLLM's where they mean the same.

    `model`: directory with safetensors, a .gguf file, or `pkg://package/file`. `device` auto takes CUDA when
    there is one. `dtype` is the type of float weights and of what they are multiplied with; auto is bfloat16 on
    CUDA; on the CPU it is float32 for GGUF files (their weights stay quantized) and the checkpoint's own dtype
    otherwise. The compiled CPU kernels keep all else in float32, and weights in a narrower type of their own as
    they are; with bfloat16 they multiply weights of 4 bits with activations of 8, up to 1.7 times as fast as exactly.
    `kv_cache_dtype` auto is `dtype`, but float16 for GGUF files on the CPU in float32; fp8_e4m3,
    fp8_e5m2 and int8 take half the memory, with a scale per token and head that is found as they are written
    (`kv_scales` "dynamic"), or with one per layer for K and one for V: "checkpoint" takes the checkpoint's, else it
    is a file of calibrated ones.
    With `deterministic` a row of logits has the same bits alone and in any batch, in whatever chunks. The compiled
    CPU kernels see to that anyway; torch is slower with it.
    `num_kv_blocks` None: as many as fit `kv_cache_memory` bytes (None: gpu_memory_utilization of a GPU's
    memory, or 1 GiB on the CPU). `max_num_batched_tokens` is the token budget of a step. `seed` seeds requests
    that bring none.

    With `attention_window` a token sees no more than the last so many tokens of its sequence, in every layer, and
    the first `attention_sinks`: the K/V of what lies between is let go, so that a sequence of any length takes bounded
    memory, at the price of what the model then no longer sees. The sinks also go with a model's own windows.

    `max_waiting_tokens` bounds the queue as max_num_waiting does. With `scheduling_policy` "priority" a request
    rises above a more important one that came `priority_ageing_s` later per step of priority. `fair_sharing`
    divides tokens equally among tenants, inside a priority if there are any. At most `max_long_prefills` prompts
    of `long_prefill_tokens` or more are prefilled at once; shorter ones pass those that wait. While sequences
    decode, prefill may make a step `max_decode_slowdown` times as long as decoding alone would be, and longer
    when there are several prompts, more than a quarter as many as decode; `inf` is no limit. Where that time is enough
    for a few tokens only, that of many steps is spent at once, by at most one of 20 steps, which then takes a
    quarter of a second at most. By priority, less important prompts take only about a quarter of the time of a more
    important prompt in a step, as long as such keep coming.
    `preemption_mode` "swap" keeps what a preempted sequence has computed in host memory, "auto" where that is
    estimated to be quicker than computing it again. `host_kv_cache_gib` of host memory also keeps evicted
    prefixes; None is 1 for "swap", else 0. What has to leave that goes to a file of `disk_kv_cache_gib`, if any, in
    `disk_kv_cache_dir` (None: the system's directory for temporary files), which is gone when the engine is.

    `num_threads` None: one per core. `executor` is "local", or `module:Class` for one that is not part of the engine;
    `executor_options` are that one's own settings.
    """

    model: str
    tokenizer: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    kv_scales: str = "dynamic"
    attention_backend: str = "auto"
    deterministic: bool = False
    executor: str = "local"
    executor_options: Mapping[str, Any] = field(default_factory=dict)
    tensor_parallel_size: int = 1
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    attention_window: int | None = None
    attention_sinks: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_num_waiting: int = 4096
    max_waiting_tokens: int = 1 << 20
    scheduling_policy: str = "fcfs"
    priority_ageing_s: float = 60.0
    fair_sharing: bool = False
    max_long_prefills: int = 2
    long_prefill_tokens: int = 1024
    max_decode_slowdown: float = 2.5
    preemption_mode: str = "auto"
    host_kv_cache_gib: float | None = None
    disk_kv_cache_gib: float = 0.0
    disk_kv_cache_dir: str | None = None
    seed: int = 0
    num_threads: int | None = None

    def __post_init__(self) -> None:
        for name, low in _MINIMA.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name} must be at least {low}, got {value}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.kv_cache_dtype not in KV_DTYPES:
            raise ConfigError(f"kv_cache_dtype must be one of {', '.join(KV_DTYPES)}, got {self.kv_cache_dtype!r}")
        if self.preemption_mode not in PREEMPTION_MODES:
            allowed = ", ".join(PREEMPTION_MODES)
            raise ConfigError(f"preemption_mode must be one of {allowed}, got {self.preemption_mode!r}")
        if self.preemption_mode == "swap" and not self.host_kv_cache_bytes:
            raise ConfigError("preemption_mode 'swap' needs host_kv_cache_gib above 0, got 0")
        if self.disk_kv_cache_gib and not self.host_kv_cache_bytes:
            raise ConfigError("disk_kv_cache_gib needs host_kv_cache_gib above 0, got 0")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")

    @property
    def host_kv_cache_bytes(self) -> int:
        if self.host_kv_cache_gib is None:
            return 1 << 30 if self.preemption_mode == "swap" else 0
        return int(self.host_kv_cache_gib * (1 << 30))


_MINIMA = {
    "tensor_parallel_size": 1,
    "block_size": 1,
    "num_kv_blocks": 1,
    "kv_cache_memory": 1,
    "attention_window": 1,
    "attention_sinks": 0,
    "max_model_len": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_num_waiting": 0,
    "max_waiting_tokens": 0,
    "priority_ageing_s": 1e-3,
    "max_long_prefills": 1,
    "long_prefill_tokens": 1,
    "max_decode_slowdown": 1.0,
    "host_kv_cache_gib": 0.0,
    "disk_kv_cache_gib": 0.0,
    "num_threads": 1,
}
