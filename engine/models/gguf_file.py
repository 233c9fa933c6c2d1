"""GGUF files, read strictly: every count, length, type and offset is checked against the file before use.

Layout (little-endian): magic, version, tensor count, metadata count; metadata (key, type, value); tensor
infos (name, dims, type, offset); padding to `general.alignment`; tensor data.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from engine.errors import ModelFileError

if TYPE_CHECKING:
    from torch import Tensor

_VERSIONS = (2, 3)
_MAX_DIMS = 4
_DTYPES: dict[GGUFValueType, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}
# Arrays whose readers rely on the element type.
_ARRAY_TYPES = {
    "tokenizer.ggml.tokens": (GGUFValueType.STRING,),
    "tokenizer.ggml.merges": (GGUFValueType.STRING,),
    "tokenizer.ggml.scores": (GGUFValueType.FLOAT32,),
    "tokenizer.ggml.token_type": (GGUFValueType.INT32, GGUFValueType.UINT32),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` in numpy order: [out, in] for a matrix. `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """Numeric metadata arrays are lists of Python numbers. `data` maps the whole file, copy on write."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data: np.ndarray[tuple[int], np.dtype[np.uint8]]

    def read(self, name: str) -> Tensor:
        """The tensor's stored bytes, flat uint8, memory-mapped: pages are read when touched."""
        import torch  # not at the top: who only needs the vocabulary, as gateways do, is spared two seconds

        try:
            t = self.tensors[name]
        except KeyError:
            raise ModelFileError(f"{self.path}: no tensor {name!r}") from None
        return torch.from_numpy(self.data[t.offset : t.offset + t.nbytes])


def read_gguf(path: Path | str) -> GgufFile:
    """Parse and validate. Raises ModelFileError naming the file and the tensor or key at fault."""
    path = Path(path)
    try:
        with path.open("rb") as f:
            head = f.read(4)
            if head != b"GGUF":
                raise ModelFileError(f"{path}: not a GGUF file (it starts with {head!r})")
            with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as buf:
                version, metadata, tensors = _Parser(path, buf).parse()
        if isinstance(parts := metadata.get("split.count", 1), int) and parts > 1:
            raise ModelFileError(
                f"{path}: it is one of {parts} parts of a model; join them with `gguf-split --merge` of llama.cpp"
            )
        data = np.memmap(path, np.uint8, mode="c")
    except OSError as e:
        raise ModelFileError(f"{path}: {e.strerror or e}") from e
    return GgufFile(path, version, metadata, tensors, data)


class _Parser:
    """A cursor over the mapped file. `what` names the item being read, for errors."""

    def __init__(self, path: Path, buf: mmap.mmap) -> None:
        self.path, self.buf, self.size = path, buf, len(buf)
        self.pos = 4
        self.what = "header"

    def parse(self) -> tuple[int, dict[str, Any], dict[str, GgufTensor]]:
        version = self.u32()
        if version and version & 0xFFFF == 0:
            self.fail("big-endian files are not supported")
        if version not in _VERSIONS:
            self.fail(f"version {version} is not supported (known: 2, 3)")
        num_tensors, num_keys = self.u64(), self.u64()
        self.fits(num_keys, 13, "metadata keys")
        self.fits(num_tensors, 32, "tensors")
        metadata: dict[str, Any] = {}
        for i in range(num_keys):
            self.what = f"metadata key {i}"
            key = self.string()
            self.what = f"key {key!r}"
            if not key or key in metadata:
                self.fail("empty or repeated")
            metadata[key] = self.value(key)
        infos = [self.tensor_info(i) for i in range(num_tensors)]
        self.what = "key 'general.alignment'"
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            self.fail(f"must be a power of two of at least 8, got {alignment!r}")
        return version, metadata, self.place(infos, alignment)

    def tensor_info(self, i: int) -> GgufTensor:
        self.what = f"tensor {i}"
        name = self.string()
        self.what = f"tensor {name!r}"
        num_dims = self.u32()
        if not 1 <= num_dims <= _MAX_DIMS:
            self.fail(f"{num_dims} dimensions (1 to {_MAX_DIMS} are possible)")
        dims = struct.unpack(f"<{num_dims}Q", self.take(8 * num_dims))
        raw_type, offset = self.u32(), self.u64()
        try:
            kind = GGMLQuantizationType(raw_type)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            self.fail(f"unknown type {raw_type}")
        if 0 in dims:
            self.fail(f"zero-size dimension in {list(dims)}")
        if dims[0] % block:
            self.fail(f"row length {dims[0]} is not a multiple of {kind.name}'s block of {block}")
        # Python integers do not overflow, so a lying dimension shows up as a size beyond the file.
        nbytes = prod(dims) // block * block_bytes
        return GgufTensor(name, tuple(reversed(dims)), kind, offset, nbytes)

    def place(self, infos: list[GgufTensor], alignment: int) -> dict[str, GgufTensor]:
        """Turn relative offsets into file offsets; refuse what is outside, unaligned, overlapping or repeated."""
        base = -(-self.pos // alignment) * alignment
        placed: dict[str, GgufTensor] = {}
        end, before = 0, ""
        for t in sorted(infos, key=lambda t: t.offset):
            self.what = f"tensor {t.name!r}"
            if not t.name or t.name in placed:
                self.fail("empty or repeated name")
            if t.offset % alignment:
                self.fail(f"offset {t.offset} is not aligned to {alignment}")
            if base + t.offset + t.nbytes > self.size:
                self.fail(
                    f"needs bytes {base + t.offset} to {base + t.offset + t.nbytes}, but the file has {self.size} "
                    "(truncated?)"
                )
            if t.offset < end:
                self.fail(f"overlaps tensor {before!r}")
            end, before = t.offset + t.nbytes, t.name
            placed[t.name] = GgufTensor(t.name, t.shape, t.type, base + t.offset, t.nbytes)
        return {t.name: placed[t.name] for t in infos}

    def value(self, key: str) -> Any:
        kind = self.value_type()
        if kind is GGUFValueType.STRING:
            return self.string()
        if kind is not GGUFValueType.ARRAY:
            return self.numbers(kind, 1)[0]
        element, count = self.value_type(), self.u64()
        if element not in (allowed := _ARRAY_TYPES.get(key, (element,))):
            self.fail(f"array of {element.name.lower()}, expected {allowed[0].name.lower()}")
        if element is GGUFValueType.ARRAY:
            self.fail("nested arrays are not supported")
        if element is GGUFValueType.STRING:
            return self.strings(count)
        self.fits(count, _DTYPES[element].itemsize, "array elements")
        return self.numbers(element, count)

    def value_type(self) -> GGUFValueType:
        raw = self.u32()
        try:
            return GGUFValueType(raw)
        except ValueError:
            self.fail(f"unknown value type {raw}")

    def numbers(self, kind: GGUFValueType, count: int) -> list[Any]:
        raw = self.take(_DTYPES[kind].itemsize * count)
        if kind is GGUFValueType.BOOL and raw.strip(b"\0\1"):
            self.fail("a boolean that is neither 0 nor 1")
        values: list[Any] = np.frombuffer(raw, _DTYPES[kind]).tolist()
        return values

    def strings(self, count: int) -> list[str]:
        """Vocabularies are 10^5 strings: one inlined loop instead of calls to string()."""
        self.fits(count, 8, "strings")
        buf, pos, size, unpack = self.buf, self.pos, self.size, struct.Struct("<Q").unpack_from
        out: list[str] = []
        try:
            for _ in range(count):
                end = pos + 8 + unpack(buf, pos)[0]
                if end > size:
                    self.short(f"string {len(out)} of {end - pos - 8} bytes", size - pos - 8)
                out.append(buf[pos + 8 : end].decode())
                pos = end
        except struct.error:
            self.short(f"string {len(out)}", size - pos)
        except UnicodeDecodeError:
            self.fail(f"string {len(out)} is not UTF-8")
        self.pos = pos
        return out

    def string(self) -> str:
        raw = self.take(self.u64())
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail("a string is not UTF-8")

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def take(self, n: int) -> bytes:
        if n > self.size - self.pos:
            self.short(f"{n} bytes", self.size - self.pos)
        self.pos += n
        return self.buf[self.pos - n : self.pos]

    def fits(self, count: int, min_bytes: int, noun: str) -> None:
        if count * min_bytes > self.size - self.pos:
            self.short(f"{count} {noun}", self.size - self.pos)

    def short(self, wanted: str, left: int) -> NoReturn:
        self.fail(f"{wanted} declared, but only {max(0, left)} bytes are left in the file (truncated?)")

    def fail(self, problem: str) -> NoReturn:
        raise ModelFileError(f"{self.path}: {self.what}: {problem}")
