"""What a model says of its rotary angles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary angles: inv_freq[i] = theta ** (-2i / head_dim), then changed as `scaling` says.

    none: not changed. linear: divided by `factor`. llama3: the wavelength-dependent interpolation of Llama 3.1. yarn:
    NTK by parts, with cos and sin multiplied by `attention_factor`. table: divided by freq_factors[i], which is how
    GGUF files say llama3.
    """

    theta: float = 10000.0
    scaling: Literal["none", "linear", "llama3", "yarn", "table"] = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: 0.1 * ln(factor) + 1
    truncate: bool = True  # yarn: the ends of the ramp are whole features
    freq_factors: tuple[float, ...] = ()  # [head_dim / 2]
