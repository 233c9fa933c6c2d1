"""What one forward pass hands down to its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.batch import ForwardBatch
from engine.kv.storage import LayerKV

KV = Sequence[LayerKV]
"""The cache of each layer."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """`metas[i]` is what layer i's attention backend planned for this batch."""

    batch: ForwardBatch
    kv: KV
    metas: Sequence[Any]
