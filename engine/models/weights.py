"""Checkpoint tensors become layers: cut for this rank, fused where they can be, in the compute form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from engine.kernels.cpu.ops import NativeKernels
from engine.kernels.fixed import stable_rows
from engine.layers.embedding import Embedding, Head
from engine.layers.linear import ColumnLinear, Part, RowLinear, concatenate
from engine.models.checkpoint import Checkpoint, StoredTensor
from engine.parallel.group import TPGroup
from engine.parallel.sharding import Split, features, rank_range
from engine.quant.base import ParamSpec, QuantFormat, Ready, Stored, fuse
from engine.quant.formats import format_for

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


class Weights:
    """One rank's layers, made from a checkpoint one at a time: each layer's stored tensors are dropped before
    the next are read, so the peak is the loaded model and one layer.

    Names are canonical, without ".weight". `dtype` is the activations'; `native` and `weight_dtype` are
    format_for's. `fixed`: products have shapes that do not depend on the batch, where `native` does not see to that.
    `rounded`: float products are of bfloat16, whatever the activations are between them.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        group: TPGroup,
        dtype: torch.dtype,
        device: torch.device,
        native: NativeKernels | None = None,
        weight_dtype: torch.dtype | None = None,
        fixed: bool = False,
    ) -> None:
        self.group = group
        self.dtype = dtype
        self.device = device
        self.rounded = torch.bfloat16 in (dtype, weight_dtype)
        self._checkpoint = checkpoint
        self._names = frozenset(checkpoint.names())
        self._native = native
        self._weight_dtype = weight_dtype
        self._fixed = fixed and native is None
        self._formats: dict[str, QuantFormat] = {}
        self._table: Ready | None = None  # the embedding's, from embedding() to head()

    def norm(self, name: str) -> Tensor:
        """A norm weight, whole on every rank; see ModelSpec.norm_offset."""
        stored, offset = self._checkpoint.load(f"{name}.weight").data, self._checkpoint.spec.norm_offset
        if offset is None:
            return stored.to(self.device, self.dtype, copy=True)
        return stored.to(self.device, torch.float32) + offset

    def rounded_as_weights(self, number: float) -> float:
        """The number rounded to the float weights' type."""
        return float(torch.tensor(number, dtype=self._weight_dtype or self.dtype))

    def column(self, *names: str) -> ColumnLinear:
        """Layers that share an input, side by side; each is cut by output features. Neighbours stored in one
        format become one matrix."""
        loaded = [(name, self._checkpoint.load(f"{name}.weight")) for name in names]
        parts = []
        for format_name, run in groupby(loaded, key=lambda item: item[1].format):
            members = list(run)
            fmt = self._format(format_name)
            cuts = [self._cut(t, "column", name) for name, t in members]
            stored = cuts[0] if len(cuts) == 1 else fuse(self._params(members[0][1]), cuts)
            biases = [self._bias(name) for name, _ in members]
            present = [b for b in biases if b is not None]
            bias = torch.cat(present) if present else None
            parts.append(self._part(fmt, fmt.finish(stored), bias, members[0][1].shape[1]))
        # The kernels' float32 is what their layers give; activations of another type are torch's to join.
        native = self._native if self.dtype is torch.float32 else None
        return ColumnLinear(parts, concatenate if native is None else native.side_by_side)

    def row(self, name: str) -> RowLinear:
        """A layer that is cut by input features."""
        tensor = self._checkpoint.load(f"{name}.weight")
        fmt = self._format(tensor.format)
        ready = fmt.finish(self._cut(tensor, "row", name))
        return RowLinear(self._part(fmt, ready, None, tensor.shape[1] // self.group.size), self.group)

    def embedding(self) -> Embedding:
        """The embedding table, whole on every rank."""
        tensor = self._checkpoint.load(_EMBEDDING)
        fmt = self._format(tensor.format)
        table = fmt.finish(self._cut(tensor, "none", _EMBEDDING))
        if _HEAD not in self._names:
            self._table = table
        return Embedding(fmt, table)

    def head(self) -> Head:
        """The output layer, or the embedding again where they are tied. Cut by vocabulary if that divides; a
        tied one that is whole shares the embedding's memory."""
        tensor = self._checkpoint.load(_HEAD if _HEAD in self._names else _EMBEDDING)
        split = self.group.size > 1 and tensor.shape[0] % self.group.size == 0
        fmt = self._format(tensor.format)
        ready, self._table = self._table, None
        if split or ready is None:
            ready = fmt.finish(self._cut(tensor, "column" if split else "none", tensor.name))
        return Head(self._part(fmt, ready, None, tensor.shape[1]), self.group, split)

    def _part(self, fmt: QuantFormat, ready: Ready, bias: Tensor | None, in_features: int) -> Part:
        part = Part(fmt, ready, bias)
        return replace(part, tile=stable_rows(part, in_features, self.dtype, self.device)) if self._fixed else part

    def _format(self, name: str) -> QuantFormat:
        if name not in self._formats:
            self._formats[name] = format_for(name, self.dtype, self._native, self._weight_dtype)
        return self._formats[name]

    def _params(self, tensor: StoredTensor) -> Mapping[str, ParamSpec]:
        out_features, in_features = tensor.shape
        return self._format(tensor.format).params(in_features, out_features)

    def _cut(self, tensor: StoredTensor, split: Split, what: str) -> Stored:
        """The rank's share of a matrix, on the device. A format's one stored tensor is the checkpoint's data."""
        specs = self._params(tensor)
        start, length = 0, 0
        if split != "none":
            start, length = rank_range(tensor.shape[1 if split == "row" else 0], self.group.rank, self.group.size, what)
        return {name: features(tensor.data, spec, split, start, length).to(self.device) for name, spec in specs.items()}

    def _bias(self, name: str) -> Tensor | None:
        if f"{name}.bias" not in self._names:
            return None
        bias = self._checkpoint.load(f"{name}.bias").data
        start, length = rank_range(bias.shape[0], self.group.rank, self.group.size, f"{name}.bias")
        return bias[start : start + length].to(self.device, self.dtype, copy=True)
