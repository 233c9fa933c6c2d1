"""A Hugging Face directory of safetensors, its headers checked against the files before any tensor is read.

A file: 8 bytes of header length, a JSON header (name -> dtype, shape, data_offsets), data.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelFileError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # safetensors' own limit
_ITEM_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """`dtype` is safetensors' name for it: F32, BF16, ..."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SafetensorsDir:
    """`files`: every weight file and JSON file that defines this checkpoint."""

    path: Path
    tensors: dict[str, TensorEntry]
    files: tuple[Path, ...]

    def read(self, name: str) -> Tensor:
        """Memory-mapped where the library can; the file is opened anew for each call."""
        if name not in self.tensors:
            raise ModelFileError(f"{self.path}: no tensor {name!r}")
        file = self.tensors[name].file
        try:
            with safe_open(file, framework="pt") as f:
                tensor: Tensor = f.get_tensor(name)
        except (OSError, ValueError, RuntimeError, SafetensorError) as e:  # the file changed since it was checked
            raise ModelFileError(f"{file}: tensor {name!r}: {e}") from e
        return tensor


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelFileError."""
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        raise ModelFileError(f"{file}: {getattr(e, 'strerror', None) or e or 'not readable'}") from e
    if not isinstance(value, dict):
        raise ModelFileError(f"{file}: not a JSON object")
    return value


def read_safetensors(path: Path) -> SafetensorsDir:
    """Check every header under `path`. Raises ModelFileError naming the file and the tensor at fault."""
    if (path / _SINGLE).exists():
        file = path / _SINGLE
        return SafetensorsDir(path, read_header(file), (file,))
    index = path / _INDEX
    if not index.exists():
        raise ModelFileError(f"{path}: neither {_SINGLE} nor {_INDEX} is there")
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(f, str) for f in places.values()):
        raise ModelFileError(f"{index}: no weight_map of tensor names to file names")
    found: dict[str, TensorEntry] = {}
    files = sorted(set(places.values()))
    for shard in files:
        if Path(shard).name != shard:
            raise ModelFileError(f"{index}: {shard!r} is not a plain file name")
        if not (path / shard).is_file():
            raise ModelFileError(f"{path / shard}: named by {_INDEX}, but absent")
        header = read_header(path / shard)
        for name, entry in header.items():
            if places.get(name) != shard:
                raise ModelFileError(f"{path / shard}: tensor {name!r} is not placed in this file by {_INDEX}")
            found[name] = entry
    for name, shard in places.items():
        if name not in found:
            raise ModelFileError(f"{path / shard}: tensor {name!r} is missing ({_INDEX} places it here)")
    return SafetensorsDir(path, found, (index, *(path / f for f in files)))


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one file. Raises ModelFileError unless they fill its data exactly, without overlap."""
    try:
        with file.open("rb") as f:
            size = os.fstat(f.fileno()).st_size
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER, size - 8):
                raise ModelFileError(f"{file}: header of {length} bytes declared in a file of {size} (truncated?)")
            raw = f.read(length)
    except OSError as e:
        raise ModelFileError(f"{file}: {e.strerror or e}") from e
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as e:
        raise ModelFileError(f"{file}: header is not valid JSON: {e}") from e
    if not isinstance(header, dict):
        raise ModelFileError(f"{file}: header is not a JSON object")
    header.pop("__metadata__", None)
    spans = {name: _span(file, name, info) for name, info in header.items()}
    end, before = 0, "the header"
    for name, (start, stop) in sorted(spans.items(), key=lambda item: item[1]):
        if start != end:
            what = "overlaps" if start < end else "leaves a gap after"
            raise ModelFileError(f"{file}: tensor {name!r} {what} {before}")
        if 8 + length + stop > size:
            raise ModelFileError(
                f"{file}: tensor {name!r} ends at byte {8 + length + stop}, but the file has {size} (truncated?)"
            )
        end, before = stop, f"tensor {name!r}"
    if 8 + length + end != size:
        raise ModelFileError(f"{file}: {size - 8 - length - end} bytes after {before} belong to no tensor")
    return {name: TensorEntry(file, info["dtype"], tuple(info["shape"])) for name, info in header.items()}


def _span(file: Path, name: str, info: Any) -> tuple[int, int]:
    """A tensor's byte range in the data, after checking that it is what dtype and shape need."""

    def fail(problem: str) -> NoReturn:
        raise ModelFileError(f"{file}: tensor {name!r}: {problem}")

    if not isinstance(info, dict) or not {"dtype", "shape", "data_offsets"} <= info.keys():
        fail("entry without dtype, shape and data_offsets")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BITS:
        fail(f"unknown dtype {dtype!r}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        fail(f"bad shape {shape!r:.80} or data_offsets {offsets!r:.80}")
    if (need := prod(shape) * _ITEM_BITS[dtype] // 8) != offsets[1] - offsets[0]:
        fail(f"{dtype} {shape} needs {need} bytes, data_offsets give {offsets[1] - offsets[0]}")
    return offsets[0], offsets[1]


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    items = list(pairs)
    if len(values := dict(items)) != len(items):
        raise ValueError("repeated name")
    return values
