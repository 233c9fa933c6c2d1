"""What logits that do not depend on the batch cost: the forward pass with and without `deterministic`, by the compiled
kernels and by torch, and whether a sequence's logits then have the same bits alone and in a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from engine.batch import build_batch
from engine.config import EngineConfig
from engine.executor.local import LocalExecutor
from engine.kernels import cpu
from engine.types import SeqSlice
from load_tests.engine_bench.bench import Bench
from load_tests.engine_bench.figures import Figures, MeasuredRow
from load_tests.engine_bench.timing import seconds

_BATCHES = (1, 8, 32)
_CONTEXT, _CHUNK = 128, 256
_BLOCK = 16
_COLUMNS = {
    "kernels": "kernels",
    "deterministic": "deterministic",
    **{f"decode_{n}": f"decode ms, batch {n}" for n in _BATCHES},
    "prefill": f"prefill of {_CHUNK}, tokens/s",
    "same": "same bits alone and in a batch",
}


def run(bench: Bench) -> list[Figures]:
    rows: list[MeasuredRow] = []
    for compiled in (True, False):
        if compiled and not cpu.available():
            bench.say("no compiled kernels on this machine")
            continue
        for deterministic in (False, True):
            rows.append(_row(bench, compiled, deterministic))
            bench.say(f"{rows[-1]}")
    notes = (f"forward pass and logits, without sampling; decode at a context of {_CONTEXT}",)
    return [Figures("determinism", "Batch-invariant logits", _COLUMNS, rows, notes)]


def _row(bench: Bench, compiled: bool, deterministic: bool) -> MeasuredRow:
    with _loaded(bench.model, compiled, deterministic) as forward:
        row: dict[str, float | str | None] = {
            "kernels": "compiled" if compiled else "torch",
            "deterministic": "true" if deterministic else "false",
        }
        whole = [forward.prefill(i) for i in range(max(_BATCHES))]
        alone = forward(whole[0])
        same = torch.equal(forward(*whole[: 2 if bench.quick else 7])[: len(alone)], alone)
        for batch in _BATCHES:
            decodes = [forward.decode(i) for i in range(batch)]
            row[f"decode_{batch}"] = 1e3 * seconds(partial(forward, *decodes), bench.budget_s)
            same = same and torch.equal(forward(*decodes)[:1], forward(decodes[0]))
        chunk = SeqSlice(0, _tokens(0, _CHUNK), 0, tuple(range(_CHUNK // _BLOCK)), sample=False)
        row["prefill"] = _CHUNK / seconds(lambda: forward(chunk, logits=False), bench.budget_s)
        row["same"] = "yes" if same else "no"
        return row


class _Forward:
    """Forward passes over a cache of its own."""

    def __init__(self, executor: LocalExecutor) -> None:
        runner = executor.rank.runner
        self._model, self._storage = runner.model, runner.storage

    @torch.inference_mode()
    def __call__(self, *slices: SeqSlice, logits: bool = True) -> Tensor:
        hidden = self._model.forward(build_batch(slices, _BLOCK, torch.device("cpu")), self._storage.layers)
        return self._model.logits(hidden) if logits else hidden

    def prefill(self, index: int) -> SeqSlice:
        per = _CONTEXT // _BLOCK + 1
        return SeqSlice(index, _tokens(index, _CONTEXT), 0, tuple(range(index * per, (index + 1) * per)), sample=True)

    def decode(self, index: int) -> SeqSlice:
        whole = self.prefill(index)
        return whole._replace(token_ids=(index + 1,), start=_CONTEXT)


def _tokens(seed: int, count: int) -> tuple[int, ...]:
    return tuple((seed + i * 7919) % 255 + 1 for i in range(count))


@contextmanager
def _loaded(model: str, compiled: bool, deterministic: bool) -> Iterator[_Forward]:
    blocks = max(_BATCHES) * (_CONTEXT // _BLOCK + 1)
    config = EngineConfig(model=model, device="cpu", num_kv_blocks=blocks, deterministic=deterministic)
    with mock.patch.object(cpu, "available", cpu.available if compiled else lambda: False):
        executor = LocalExecutor(config)
        executor.start()
    try:
        yield _Forward(executor)
    finally:
        executor.shutdown()
