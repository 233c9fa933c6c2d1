"""Rotary position embedding: the angles, as tables. The rotation itself is a kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers.rope_spec import RopeSpec


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """cos and sin of every position's angles, [max_position, head_dim / 2] float32. One per model."""

    cos: Tensor
    sin: Tensor


def rotary(rope: RopeSpec, head_dim: int, max_position: int, device: torch.device) -> Rotary:
    """Angles are multiplied in float32, as the models were trained and as other implementations do."""
    inv_freq, scale = inverse_frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inv_freq)
    return Rotary((angles.cos() * scale).to(device), (angles.sin() * scale).to(device))


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    """([head_dim / 2] float32, the factor on cos and sin) for RopeSpec's scaling."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope.scaling:
        case "none":
            return plain, 1.0
        case "linear":
            return plain / rope.factor, 1.0
        case "table":
            return plain / torch.tensor(rope.freq_factors, dtype=torch.float32), 1.0
        case "llama3":
            return _llama3(rope, plain), 1.0
        case "yarn":
            scale = rope.attention_factor
            if scale is None:
                scale = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
            return _yarn(rope, plain, head_dim), scale


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between interpolated."""
    turns = rope.original_max_position * plain / (2 * math.pi)  # within the original context
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
    return (1 - keep) * plain / rope.factor + keep * plain


def _yarn(rope: RopeSpec, plain: Tensor, head_dim: int) -> Tensor:
    """Features that turn more than beta_fast times in the original context are kept, those that turn less
    than beta_slow times are stretched, with a linear ramp over the feature index between."""

    def feature(turns: float) -> float:
        return head_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = feature(rope.beta_fast), feature(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, head_dim - 1)
    width = max(high - low, 0.001)
    stretch = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / rope.factor * stretch + plain * (1 - stretch)
