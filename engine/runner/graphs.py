"""Steps on the CPU kernels, captured once and replayed as one native call.

What CUDA graphs do on a GPU: at batch 1 the Python of a forward pass costs as much as its kernels, and at any size it
holds the GIL, three hundred times a step, that streaming in the same process wants. Here the number of rows and of
sequences are arguments of a replay, so that one capture serves every step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.batch import ForwardBatch
from engine.errors import EngineError
from engine.kernels.cpu.ops import NativeKernels
from engine.kernels.cpu.tape import BufferPool, Tape
from engine.layers.context import KV
from engine.models.base import Model
from engine.runner.other_ops import OtherOps
from engine.types import SeqSlice

logger = logging.getLogger(__name__)

_MOST_ROWS = 512  # beyond, the Python between the kernels is a hundredth of a step, and the buffers would be large


@dataclass(frozen=True, slots=True)
class _Capture:
    """`output`: where a replay leaves its rows, and room for the most that it may have."""

    tape: Tape
    output: Tensor


class StepGraph:
    """For a model all of whose computing is `kernels`' own; of another the first capture finds out, and from
    then on hidden() declines. The first step is an ordinary one, and captured; it should have more than one row, lest
    a constant be taken for its number of rows.

    `kv` and the model's weights must stay where they are. One thread at a time.
    """

    def __init__(
        self,
        model: Model,
        kv: KV,
        kernels: NativeKernels,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        block_size: int,
    ) -> None:
        max_rows = max(max_num_seqs, min(max_num_tokens, _MOST_ROWS))
        self._model = model
        self._kv = kv
        self._kernels = kernels
        self._inputs = _Inputs(max_rows, max_num_seqs, max_model_len, block_size)
        self._layer_buffers, self._head_buffers = BufferPool(max_rows), BufferPool(max_num_seqs)
        self._layers: _Capture | None = None
        self._head: _Capture | None = None
        self._chosen = torch.empty(0)  # the head's input
        self._works = True

    @property
    def captured(self) -> bool:
        """Whether both halves of a step, the layers and the head, are replayed from now on."""
        return self._layers is not None and self._head is not None

    @property
    def buffer_bytes(self) -> tuple[int, int]:
        """Memory for the outputs of the layers and of the head."""
        return self._layer_buffers.nbytes, self._head_buffers.nbytes

    def hidden(self, slices: Seq[SeqSlice]) -> Tensor | None:
        """The hidden states [T, hidden] of a step, bit for bit those of Model.forward, until the next call.

        None for steps of too many rows and for models that cannot be captured. Raises EngineError for a position
        beyond the context.
        """
        if not self._works or not (rows := self._inputs.take(slices)):
            return None
        if self._layers is None:
            return self._capture_layers(rows, len(slices))
        self._layers.tape.replay(rows, len(slices))
        return self._layers.output[:rows]

    def logits(self, hidden: Tensor, rows: Seq[int]) -> Tensor:
        """The logits [len(rows), vocab] of some rows, at most max_num_seqs, of what hidden() gave, bit for bit those
        of Model.logits. The caller may overwrite them; the next call does."""
        count = len(rows)
        if self._head is None:
            self._chosen = torch.empty(self._head_buffers.max_rows, hidden.shape[1])
        np.take(hidden.numpy(), rows, axis=0, out=self._chosen.numpy()[:count], mode="clip")  # "raise" makes a copy
        if self._head is None:
            return self._capture_head(count)
        self._head.tape.replay(count)
        return self._head.output[:count]

    def _capture_layers(self, rows: int, seqs: int) -> Tensor | None:
        batch = self._inputs.batch(rows, seqs)
        with self._kernels.record(self._layer_buffers) as tape, OtherOps() as others:
            hidden = self._model.forward(batch, self._kv)
        if self._accepts(tape, rows, others):
            self._layers = _Capture(tape, self._layer_buffers.alias(hidden))
            return hidden
        return None

    def _capture_head(self, rows: int) -> Tensor:
        with self._kernels.record(self._head_buffers) as tape, OtherOps() as others:
            logits = self._model.logits(self._chosen[:rows])
        if self._accepts(tape, rows, others):
            self._head = _Capture(tape, self._head_buffers.alias(logits))
        return logits

    def _accepts(self, tape: Tape, rows: int, others: OtherOps) -> bool:
        reasons = others.names or {f"{n} rows beside {rows}" for n in tape.row_counts - {rows}}
        if reasons:
            self._works = False
            logger.info("steps are not captured: the model uses %s", ", ".join(sorted(reasons)))
        return not reasons


class _Inputs:
    """The tensors that steps of every size share; a batch of T rows and B sequences has the first T and B."""

    def __init__(self, max_rows: int, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self._max_rows = max_rows
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._block_size = block_size
        width = -(-max_model_len // block_size)
        longs = torch.zeros(3, max_rows, dtype=torch.int64)
        self._ids, self._positions, self._slots = longs
        self._query_starts = torch.zeros(max_num_seqs + 1, dtype=torch.int32)
        self._seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32)
        self._table = torch.zeros(max_num_seqs, width, dtype=torch.int32)
        self._ids_np, self._positions_np, self._slots_np = longs.numpy()
        self._query_starts_np = self._query_starts.numpy()
        self._seq_lens_np = self._seq_lens.numpy()
        self._table_np = self._table.numpy()
        self._in_table: list[tuple[int, ...]] = [()] * max_num_seqs
        self._numbers = np.arange(max_rows + 1)

    def take(self, slices: Seq[SeqSlice]) -> int:
        """Write a step's numbers into the tensors. Returns how many rows it has; 0 if that is too many."""
        num_seqs, size = len(slices), self._block_size
        counts = [len(s.token_ids) for s in slices]
        rows = sum(counts)
        if num_seqs > self._max_num_seqs or rows > self._max_rows:
            return 0
        starts = np.array([s.start for s in slices])
        if rows == num_seqs:  # one token each, as in most steps
            sequence, positions, ends = self._numbers[:rows], starts, starts + 1
            self._query_starts_np[1 : num_seqs + 1] = self._numbers[1 : num_seqs + 1]
        else:
            ends = starts + counts
            np.cumsum(counts, out=self._query_starts_np[1 : num_seqs + 1])
            sequence = self._numbers[:num_seqs].repeat(counts)
            positions = self._numbers[:rows] + (starts - self._query_starts_np[:num_seqs])[sequence]
        if (last := int(ends.max()) - 1) >= self._max_model_len:
            raise EngineError(f"position {last} is beyond the context of {self._max_model_len} tokens")
        for i, s in enumerate(slices):
            if self._in_table[i] != s.block_ids:  # in most steps no block is added
                self._table_np[i, : len(s.block_ids)] = s.block_ids
                self._in_table[i] = s.block_ids
        self._seq_lens_np[:num_seqs] = ends
        self._ids_np[:rows] = [token for s in slices for token in s.token_ids]
        blocks, offsets = np.divmod(positions, size)
        self._positions_np[:rows] = positions
        self._slots_np[:rows] = self._table_np[sequence, blocks].astype(np.int64) * size + offsets
        return rows

    def batch(self, rows: int, num_seqs: int) -> ForwardBatch:
        return ForwardBatch(
            input_ids=self._ids[:rows],
            positions=self._positions[:rows],
            slots=self._slots[:rows],
            query_starts=self._query_starts[: num_seqs + 1],
            seq_lens=self._seq_lens[:num_seqs],
            block_table=self._table[:num_seqs],
        )
