"""What a replica tells the gateway about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """`max_model_len`: the longest sequence that can ever run here: the model's context, or the KV pool if smaller.
    `fingerprint` names the weights."""

    max_model_len: int
    fingerprint: str
