"""The model under measurement, loaded once; engines over it come and go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.batch import build_batch
from engine.config import EngineConfig
from engine.engine import Engine
from engine.executor.local import LocalExecutor
from engine.kv.storage import KVStorage
from engine.models.checkpoint import open_checkpoint
from engine.models.locate import resolve
from engine.text import load_text
from engine.types import FinishReason, GenerateRequest, SamplingParams, SeqSlice, StepPlan, StepResult
from load_tests.engine_bench.executors import Prefilled, Shared

GREEDY = SamplingParams(max_tokens=128, temperature=0.0, ignore_eos=True)
_MAX_LEN = 6400
_KV_BYTES = 7 << 29  # 64 sequences of 1k, or 8 of 4k, of a model of 46 kB per token
_QUICK_BLOCKS = 728  # 8 sequences of 1k and their answers, with some to spare
_ADMIT_TOKENS = 8192
_HOST_GIB = 0.25  # two sequences of 4k


class Subject:
    """Its cache is filled with random numbers: pages never written would share one physical page, and reading them
    would cost no memory bandwidth."""

    def __init__(self, model: str, quick: bool) -> None:
        limit = open_checkpoint(resolve(model)).spec.max_position
        self.config = EngineConfig(
            model=model,
            device="cpu",
            enable_prefix_caching=False,
            max_model_len=min(limit, _MAX_LEN // 4 if quick else _MAX_LEN),
            host_kv_cache_gib=_HOST_GIB,
            kv_cache_memory=_KV_BYTES if _memory() >= 2 * _KV_BYTES else _KV_BYTES // 7,
            num_kv_blocks=_QUICK_BLOCKS if quick else None,
        )
        self._executor = LocalExecutor(self.config)
        self.capacity = self._executor.start()
        self.text = load_text(str(resolve(model)))
        runner = self._executor.rank.runner
        self.model, self.storage = runner.model, runner.storage
        _fill(self.storage)

    @property
    def kv_bytes_per_token(self) -> float:
        layout = self.storage.layout
        return layout.bytes_per_block / layout.block_size

    @contextmanager
    def engine(self, **settings: Any) -> Iterator[Engine]:
        """As it is in the product, without prefix caching, and with other settings of the scheduler."""
        engine = Engine(
            replace(self.config, **settings), executor=Shared(self._executor, self.capacity), text=self.text
        )
        try:
            yield engine
        finally:
            engine.close()

    @contextmanager
    def decoding(self, batch: int, context: int, params: SamplingParams = GREEDY) -> Iterator[tuple[Engine, Prefilled]]:
        """An engine whose every step decodes one token of each of `batch` sequences, from about `context` tokens on,
        for as long as `params` let them run. `fits` must hold."""
        executor = Prefilled(self._executor, self.capacity)
        config = replace(self.config, max_num_batched_tokens=_ADMIT_TOKENS, max_num_seqs=max(batch, 64))
        engine = Engine(config, executor=executor, text=self.text)
        try:
            for i in range(batch):
                engine.add(GenerateRequest(str(i), (1,) * context, params))
            waiting = {str(i) for i in range(batch)}
            while waiting:
                waiting -= {delta.request_id for delta in engine.step()}
            yield engine, executor
        finally:
            engine.abort_all(FinishReason.ABORT)
            engine.close()

    def fits(self, batch: int, context: int) -> bool:
        """Whether decoding() can hold so many sequences without preemption."""
        tokens = context + GREEDY.max_tokens
        blocks = -(-tokens // self.config.block_size) + 1
        return tokens <= self.capacity.max_model_len and batch * blocks < self.capacity.num_blocks

    def run(self, plan: StepPlan) -> StepResult:
        return self._executor.submit(plan).result()

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Tensor:
        """The logits of every row, computed layer by layer, whatever shorter way the runner may know."""
        batch = build_batch(plan.slices, self.config.block_size, torch.device("cpu"))
        return self.model.logits(self.model.forward(batch, self.storage.layers))


def decodes(count: int) -> StepPlan:
    """`count` sequences, one token each."""
    return StepPlan(0, tuple(SeqSlice(i, (1,), 0, (i,), sample=True) for i in range(count)))


def _fill(storage: KVStorage) -> None:
    for layer in storage.layers:
        for cache in layer:
            cache.copy_(torch.randn(cache.shape[1:]))


def _memory() -> int:
    """Bytes of physical memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
