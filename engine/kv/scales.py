"""Scales of a narrow K/V cache that are known beforehand: the checkpoint's, or calibrated ones from a file."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KVScales:
    """Per layer the largest magnitude of K (rotated) and of V that the cache is to hold: it gets the largest code,
    and what is larger is stored as it."""

    keys: tuple[float, ...]
    values: tuple[float, ...]

    @property
    def fingerprint(self) -> str:
        """A short name of the values, for cache keys."""
        return hashlib.sha256(repr((self.keys, self.values)).encode()).hexdigest()[:16]


def read_scales(path: Path, num_layers: int) -> KVScales:
    """The scales of a file that write_scales() wrote. Raises ConfigError naming what is wrong."""
    try:
        largest = json.loads(path.read_bytes())["largest"]
        found = {name: largest[name] for name in ("k", "v")}
    except OSError as e:
        raise ConfigError(
            f"kv_scales must be dynamic, checkpoint or a file that `engine_bench kv_quality --calibrate FILE` wrote; "
            f"{path}: {e.strerror or e}"
        ) from e
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"kv_scales: {path} is not a file of scales: it needs largest.k and largest.v") from e
    for name, values in found.items():
        if not isinstance(values, list) or len(values) != num_layers:
            count = len(values) if isinstance(values, list) else "no list"
            raise ConfigError(
                f"kv_scales: {path}: largest.{name} has {count} entries, the model has {num_layers} layers"
            )
        for i, value in enumerate(values):
            if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
                raise ConfigError(f"kv_scales: {path}: largest.{name}[{i}] must be a number above 0, got {value!r:.40}")
    return KVScales(*(tuple(map(float, found[name])) for name in ("k", "v")))


def write_scales(path: Path, keys: Seq[float], values: Seq[float]) -> None:
    """Write the largest magnitudes of K and of V in each layer to a file that read_scales() reads."""
    path.write_text(json.dumps({"largest": {"k": list(keys), "v": list(values)}}, indent=1) + "\n")
