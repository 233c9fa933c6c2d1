"""Decode steps on the CPU kernels, captured once per batch size and replayed as one native call.

What CUDA graphs do on a GPU: at batch 1 the Python of a forward pass costs as much as its kernels, and holds
the GIL that streaming in the same process wants.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from engine.errors import EngineError
from engine.kernels.cpu.ops import NativeKernels
from engine.kernels.cpu.tape import BufferPool, Tape
from engine.layers.context import KV
from engine.models import Model
from engine.runner.batch import ForwardBatch
from engine.types import SeqSlice

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Graph:
    tape: Tape
    logits: Tensor  # where the replay leaves them


class DecodeGraphs:
    """For a model all of whose computing is `kernels`' own; of another the first capture finds out, and from
    then on logits() declines. Every size is captured when it first comes up, by an ordinary step.

    `kv` and the model's weights must stay where they are. One thread at a time.
    """

    def __init__(
        self, model: Model, kv: KV, kernels: NativeKernels, max_num_seqs: int, max_model_len: int, block_size: int
    ) -> None:
        self._model = model
        self._kv = kv
        self._kernels = kernels
        self._inputs = _Inputs(max_num_seqs, max_model_len, block_size)
        self._buffers = BufferPool(max_num_seqs)
        self._graphs: dict[int, _Graph] = {}
        self._works = True

    def logits(self, slices: Seq[SeqSlice]) -> Tensor | None:
        """The next-token logits [B, vocab] of a step in which every slice is one token and samples, bit for
        bit those of Model.forward and logits. The caller may overwrite them; the next call does.

        None for other steps and for models that cannot be captured. Raises EngineError for a position beyond
        the context.
        """
        if not self._works or not self._inputs.take(slices):
            return None
        graph = self._graphs.get(len(slices))
        if graph is None:
            return self._capture(len(slices))
        graph.tape.replay()
        return graph.logits

    def _capture(self, num_seqs: int) -> Tensor:
        batch = self._inputs.batch(num_seqs)
        with self._kernels.record(self._buffers) as tape, _OtherOps() as others:
            logits = self._model.logits(self._model.forward(batch, self._kv))
        if others.names:
            self._works = False
            logger.info("decode steps are not captured: the model uses %s", ", ".join(sorted(others.names)))
        else:
            self._graphs[num_seqs] = _Graph(tape, self._buffers.alias(logits))
        return logits


class _Inputs:
    """The tensors that decode batches of every size share; a batch of B has the first B rows."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._block_size = block_size
        width = -(-max_model_len // block_size)
        longs = torch.zeros(3, max_num_seqs, dtype=torch.int64)
        self._ids, self._positions, self._slots = longs
        self._query_starts = torch.arange(max_num_seqs + 1, dtype=torch.int32)
        self._seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32)
        self._table = torch.zeros(max_num_seqs, width, dtype=torch.int32)
        self._longs_np = longs.numpy()
        self._seq_lens_np = self._seq_lens.numpy()
        self._table_np = self._table.numpy()
        self._in_table: list[tuple[int, ...]] = [()] * max_num_seqs

    def take(self, slices: Seq[SeqSlice]) -> bool:
        """Write a decode step's numbers; False if it is not one."""
        count, size = len(slices), self._block_size
        if count > self._max_num_seqs or not all(len(s.token_ids) == 1 and s.sample for s in slices):
            return False
        starts = [s.start for s in slices]
        if max(starts) >= self._max_model_len:
            raise EngineError(f"position {max(starts)} is beyond the context of {self._max_model_len} tokens")
        self._longs_np[:, :count] = (
            [s.token_ids[0] for s in slices],
            starts,
            [s.block_ids[s.start // size] * size + s.start % size for s in slices],
        )
        self._seq_lens_np[:count] = starts
        self._seq_lens_np[:count] += 1
        for i, s in enumerate(slices):
            if self._in_table[i] != s.block_ids:  # in most steps no block is added
                self._table_np[i, : len(s.block_ids)] = s.block_ids
                self._in_table[i] = s.block_ids
        return True

    def batch(self, num_seqs: int) -> ForwardBatch:
        return ForwardBatch(
            input_ids=self._ids[:num_seqs],
            positions=self._positions[:num_seqs],
            slots=self._slots[:num_seqs],
            query_starts=self._query_starts[: num_seqs + 1],
            seq_lens=self._seq_lens[:num_seqs],
            block_table=self._table[:num_seqs],
            max_query_len=1,
            max_seq_len=self._max_model_len,
        )


class _OtherOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the names of the torch ops that do more than give another view of a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # By where the results lie, for ops such as reshape copy only if they must.
        if func._schema.is_mutable or not _storages(result) <= _storages(args):
            self.names.add(str(func))
        return result


def _storages(values: Any) -> set[int]:
    """Where the tensors among `values` (one, or a sequence) begin; 0 stands for anything else."""
    items = values if isinstance(values, list | tuple) else (values,)
    return {x.untyped_storage().data_ptr() if isinstance(x, Tensor) else 0 for x in items}
