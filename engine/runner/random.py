"""Counter-based randomness: a draw is a pure function of (seed, position).

There is no generator state to save, so a draw never depends on the neighbours in a batch, on chunking, on
preemption or on a restart. The mixer is splitmix64's finaliser (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", 2014): a bijection of 64-bit words in which every input bit flips each output
bit with probability close to one half.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: consecutive counters land far apart
_CHOICE = 0xD1B54A32D192ED03  # another odd constant, so that choices and positions walk different lattices

Words = npt.NDArray[np.uint64]


def _mix(x: Words) -> Words:
    """splitmix64's finaliser, elementwise. Arrays only: numpy wraps arrays silently but warns for scalars."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _words(values: Seq[int]) -> Words:
    """Any integers, negative or huge, modulo 2**64."""
    return np.fromiter((v & _MASK for v in values), np.uint64, len(values))


def uniform(seeds: Seq[int], positions: Seq[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), with 53 random bits.

    This is splitmix64 started at mix(seed + G) and stepped position + 1 times at once: u = mix(mix(seed + G) +
    (position + 1) * G) >> 11, times 2**-53. Mixing the seed first throws nearby seeds far apart, so that
    (seed + 1, position) and (seed, position + 1) are unrelated.
    """
    start = _mix(_words(seeds) + np.uint64(_GOLDEN))
    state = start + (_words(positions) + np.uint64(1)) * np.uint64(_GOLDEN)
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request, in [0, 2**64). Choice 0 keeps the request's own seed, so that
    n = 1 repeats the first choice of n = 8; the others get streams of their own."""
    if index == 0:
        return seed & _MASK
    key = _mix(_words([seed ^ _CHOICE]))
    return int(_mix(key + _words([index * _CHOICE]))[0])


def derive_seed(engine_seed: int, request: int | str) -> int:
    """A seed in [0, 2**64) for a request that brought none, from the engine's seed and a counter or request id."""
    digest = hashlib.blake2b(f"{engine_seed}:{request}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
