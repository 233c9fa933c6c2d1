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
    """Settings of one engine. Keys are named as vLLM's where they mean the same.

    Raises ConfigError for a value that no model could run with. What depends on the model or the machine is checked
    when the engine loads.
    """

    model: str
    """The model: a directory with config.json and safetensors files, a `.gguf` file, or `pkg://package/file` for a
    file inside an installed Python package."""

    tokenizer: str | None = None
    """Directory or `.gguf` file to take the tokenizer from. Default: the model's own."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:<index>`. `auto` takes CUDA when there is a device."""

    dtype: str = "auto"
    """Type of float weights and of what they are multiplied with: `auto`, `float32`, `bfloat16` or `float16`. `auto`
    is bfloat16 on CUDA; on the CPU it is float32 for GGUF files, whose weights stay quantized, and the checkpoint's
    own type otherwise. The compiled CPU kernels keep everything between the products in float32. With `bfloat16` they
    multiply weights of 4 bits with activations of 8 bits, up to 1.7 times as fast as exactly."""

    quantization: str = "auto"
    """What the checkpoint's weights are stored as: `auto`, `gguf` or `none`. Nothing is quantized on loading: a value
    other than `auto` only refuses a checkpoint of another kind."""

    kv_cache_dtype: str = "auto"
    """Type of the KV cache: `auto`, `float32`, `bfloat16`, `float16`, `fp8_e4m3`, `fp8_e5m2` or `int8`. `auto` is
    `dtype`, but float16 for GGUF files on the CPU in float32, because the rounding is small beside that of the weights
    and half the bytes are half the time of a long context. The 8-bit types take half the memory of float16."""

    kv_scales: str = "dynamic"
    """Scales of an 8-bit KV cache. `dynamic`: one per token and head, found as they are written. `checkpoint`: one per
    layer for K and one for V, from the checkpoint. Anything else is the path of a file of calibrated scales."""

    attention_backend: str = "auto"
    """`auto`, `cpu_native`, `torch` or `torch_fixed`. `auto` takes the first of these that fits the machine, the types
    and `deterministic`."""

    deterministic: bool = False
    """Whether a row of logits has the same bits alone and in any batch, in whatever chunks. The compiled CPU kernels
    see to that anyway; without them it costs speed."""

    executor: str = "local"
    """What runs the steps: `local`, one rank in this process, or `module:Class` for an executor that is not part of
    the engine. Such a class follows engine.executor.base.Executor and must be importable where the engine runs."""

    executor_options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of an executor named as `module:Class`, which gives them their meaning. `local` has none."""

    tensor_parallel_size: int = 1
    """Ranks that share one model, at least 1. `local` runs 1."""

    block_size: int = 16
    """Tokens per block of the KV cache, at least 1. The compiled kernels want a multiple of 16; larger blocks share
    less of a prefix, smaller ones make longer block tables."""

    num_kv_blocks: int | None = None
    """Blocks in the KV cache, at least 1. Default: as many as fit the memory."""

    kv_cache_memory: int | None = None
    """Bytes for the KV cache where `num_kv_blocks` is not set. Default: what `gpu_memory_utilization` leaves on a GPU;
    on the CPU 1 GiB, or more if one sequence of the model's whole context needs more, but at most half of the free
    memory. It must hold one sequence of `max_model_len` tokens where that is set."""

    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that weights, buffers and KV cache may take together, above 0 and at most 1. The
    default is vLLM's."""

    enable_prefix_caching: bool = True
    """Whether requests of one cache salt share the blocks of equal beginnings. Output does not change by it."""

    attention_window: int | None = None
    """Tokens that a token sees at most, itself included, in every layer, besides the sinks; at least 1. The blocks of
    what no layer sees any more are freed, so that a sequence of any length takes bounded memory, at the price of what
    the model no longer sees. Default: the model's own windows, if it has any."""

    attention_sinks: int = 0
    """Tokens at the beginning of a sequence that stay visible beside a window, at least 0. They go with
    `attention_window` and with a model's own windows."""

    max_model_len: int | None = None
    """Tokens of prompt and output together that one sequence may have, at least 1. It must not exceed the model's own
    limit. Default: that limit, or what fits into the KV cache if that is less, which a line in the log says."""

    max_num_seqs: int = 64
    """Sequences that run at once, at least 1. More of them share each reading of the weights, but make every step
    longer; the default suits a CPU."""

    max_num_batched_tokens: int = 512
    """Token budget of a step, at least 1: decodes and chunks of prompts together. 512 keep the CPU's products
    efficient; more would only make steps longer."""

    max_num_waiting: int = 4096
    """Requests that may wait, at least 0. One more is refused: the client should go elsewhere or come again."""

    max_waiting_tokens: int = 1 << 20
    """Tokens that all waiting requests may have together, at least 0."""

    scheduling_policy: str = "fcfs"
    """Order of waiting requests. `fcfs`: by arrival. `priority`: more important ones first, which may also preempt
    less important running ones."""

    priority_ageing_s: float = 60.0
    """Seconds, at least 0.001: with `priority`, a request comes before one that is n steps of priority more important
    if it arrived n times this long before it. So nothing waits for ever."""

    fair_sharing: bool = False
    """Whether tenants share tokens equally, among requests of one priority."""

    max_long_prefills: int = 2
    """Prompts of `long_prefill_tokens` or more that are prefilled at once, at least 1. Shorter ones pass those that
    have to wait for this."""

    long_prefill_tokens: int = 1024
    """Tokens from which on a prompt counts as long, at least 1: twice a step's budget."""

    max_decode_slowdown: float = 2.5
    """How many times as long as decoding alone a step may take because of prompts, at least 1; `inf` is no limit. It
    may take longer when the prompts are several and more than a quarter as many as the sequences that decode. Where the
    time is enough for a few tokens of prompt only, that of many steps is spent at once, in at most one of 20 steps,
    which then takes a quarter of a second at most. The default keeps the 95th percentile of the time between tokens
    below 3 times that of an idle engine (`python -m load_tests.engine_bench scheduling`)."""

    preemption_mode: str = "auto"
    """What becomes of the KV of a preempted sequence. `recompute`: freed, and computed again. `swap`: kept in host
    memory. `auto`: kept where copying is estimated to be quicker than computing."""

    host_kv_cache_gib: float | None = None
    """GiB of host memory for the KV of preempted sequences and for evicted prefixes, at least 0. Default: 1 with
    `preemption_mode: swap`, else 0."""

    disk_kv_cache_gib: float = 0.0
    """GiB of a file for KV that has to leave host memory, at least 0. It needs `host_kv_cache_gib` above 0."""

    disk_kv_cache_dir: str | None = None
    """Directory of that file, which is gone when the engine is. Default: the system's directory for temporary files."""

    seed: int = 0
    """Seed of the requests that bring none: their own seeds are drawn from it, in order of arrival."""

    num_threads: int | None = None
    """Threads that compute, at least 1. Default: one per core that the process may use."""

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
        """`host_kv_cache_gib` in bytes, with its default."""
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
