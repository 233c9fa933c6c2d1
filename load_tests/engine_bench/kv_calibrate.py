"""Scales for a narrow K/V cache, from what a text puts into a wide one."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from engine.config import EngineConfig
from engine.engine import Engine
from engine.executor.local import LocalExecutor
from engine.kv.scales import write_scales
from engine.types import SamplingParams

_TOKENS = 1024


def calibrate(model: str, text: str, path: Path) -> int:
    """Write a file for `kv_scales` to `path`: per layer the largest K and V of the text's first tokens. Returns how
    many tokens."""
    config = EngineConfig(model=model, device="cpu", kv_cache_dtype="float32", num_kv_blocks=_TOKENS // 16)
    executor = LocalExecutor(config)
    engine = Engine(config, executor=executor)
    try:
        ids = engine.text.tokenizer.encode(text)[: min(_TOKENS, engine.capacity.max_model_len) - 1]
        engine.generate([ids], [SamplingParams(max_tokens=1, temperature=0.0)])
        layers = executor.rank.runner.storage.layers  # what was never written is zero
        write_scales(path, *([_largest(layer[i]) for layer in layers] for i in range(2)))
    finally:
        engine.close()
    return len(ids)


def _largest(x: Tensor) -> float:
    return float(x.abs().max())
