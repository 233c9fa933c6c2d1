from __future__ import annotations

import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Ggml
from helpers_models import demo_gguf, make_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelFileError
from engine.models.gguf_file import GgufFile, read_gguf


def text(s: str | bytes) -> bytes:
    raw = s.encode() if isinstance(s, str) else s
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


ARCH = key("general.architecture", 8, text("llama"))
T0 = tensor("a.weight", [32, 2], 0, 0)  # 256 bytes of F32
T1 = tensor("b.weight", [32], 8, 256)  # one block of Q8_0, 34 bytes


def write(
    path: Path,
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
    data: int = 320,
) -> Path:
    keys = [ARCH] if keys is None else keys
    tensors = [T0, T1] if tensors is None else tensors
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    body = head + b"".join(keys) + b"".join(tensors)
    body += b"\0" * (-len(body) % 32) + bytes(i % 251 for i in range(data))
    file = path / "m.gguf"
    file.write_bytes(body)
    return file


def refused(file: Path, *words: str) -> None:
    """Refused naming the file and the words, without allocating more than the file could justify."""
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError) as e:
            read_gguf(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    for word in (str(file), *words):
        assert word in str(e.value)


def test_reads_what_it_should(tmp_path: Path) -> None:
    numbers = key("n", 9, struct.pack("<IQ3i", 5, 3, -1, 0, 7))
    strings = key("s", 9, struct.pack("<IQ", 8, 2) + text("ä") + text(""))
    scalars = [key("f", 12, struct.pack("<d", 0.5)), key("b", 7, b"\1"), key("u", 10, struct.pack("<Q", 2**63))]
    g = read_gguf(write(tmp_path, [ARCH, numbers, strings, *scalars]))
    assert g.version == 3
    assert g.metadata == {
        "general.architecture": "llama", "n": [-1, 0, 7], "s": ["ä", ""], "f": 0.5, "b": True, "u": 2**63,
    }  # fmt: skip
    assert list(g.tensors) == ["a.weight", "b.weight"]
    a, b = g.tensors.values()
    assert (a.shape, a.type, a.nbytes) == ((2, 32), Ggml.F32, 256)
    assert (b.shape, b.type, b.nbytes, b.offset) == ((32,), Ggml.Q8_0, 34, a.offset + 256)
    assert g.read("b.weight").tolist() == [i % 251 for i in range(256, 290)]
    assert g.read("a.weight").view(torch.float32).shape == (64,)
    with pytest.raises(ModelFileError, match=r"m\.gguf.*'c'"):
        g.read("c")


def test_alignment_is_honoured(tmp_path: Path) -> None:
    file = write(tmp_path, [ARCH, key("general.alignment", 4, struct.pack("<I", 8))], [tensor("x", [2], 0, 8)])
    assert read_gguf(file).tensors["x"].offset % 8 == 0


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_agrees_with_the_gguf_package(tmp_path: Path, arch: str) -> None:
    same_as_package(make_gguf(tmp_path, arch))


def test_agrees_with_the_gguf_package_on_the_demo_model() -> None:
    g = read_gguf(demo_gguf())
    assert len(g.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(g.metadata["tokenizer.ggml.merges"]) == 48900
    assert g.tensors["token_embd.weight"].shape == (49152, 576)
    assert g.tensors["blk.0.attn_k.weight"].type is Ggml.Q4_1


def same_as_package(file: Path) -> None:
    ours, theirs = read_gguf(file), gguf.GGUFReader(file)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert {k: v for k, v in ours.metadata.items() if v != []} == {k: v for k, v in fields.items() if v != []}
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for t in theirs.tensors:
        got = ours.tensors[t.name]
        assert (got.shape, got.type, got.offset, got.nbytes) == (
            tuple(reversed(t.shape.tolist())), t.tensor_type, t.data_offset, t.n_bytes,
        )  # fmt: skip
        assert np.array_equal(ours.read(t.name).numpy(), t.data.view(np.uint8).reshape(-1))


def test_truncated_demo_model(tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    shutil.copy(demo_gguf(), file)
    file.chmod(0o600)
    size = file.stat().st_size
    for cut in (size - 1, size - 4096, size // 2):
        with file.open("r+b") as f:
            f.truncate(cut)
        with pytest.raises(ModelFileError, match=r"cut\.gguf: tensor '.*truncated"):
            read_gguf(file)
    for cut in (1_000_000, 23, 4, 3):
        with file.open("r+b") as f:
            f.truncate(cut)
        with pytest.raises(ModelFileError, match=r"cut\.gguf: "):
            read_gguf(file)


@pytest.mark.parametrize("size", range(0, 430, 7))
def test_every_truncation_is_refused(tmp_path: Path, size: int) -> None:
    file = write(tmp_path, data=290)
    whole = file.read_bytes()
    assert size < len(whole)
    file.write_bytes(whole[:size])
    refused(file)


LIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "magic": ({"magic": b"GGML"}, ("not a GGUF",)),
    "version 99": ({"version": 99}, ("version 99",)),
    "version 1": ({"version": 1}, ("version 1",)),
    "version 0": ({"version": 0}, ("version 0",)),
    "big-endian": ({"version": 3 << 24}, ("big-endian",)),
    "n_tensors 2^63": ({"num_tensors": 2**63}, ("tensors",)),
    "n_keys 2^63": ({"num_keys": 2**63}, ("metadata keys",)),
    "one tensor too many": ({"num_tensors": 3, "data": 290}, ()),
    "one key too many": ({"num_keys": 2}, ()),
    "offset past the end": ({"tensors": [T0, tensor("b.weight", [32], 8, 1 << 20)]}, ("'b.weight'",)),
    "offset 2^64-32": ({"tensors": [T0, tensor("b.weight", [32], 8, 2**64 - 32)]}, ("'b.weight'",)),
    "offset unaligned": ({"tensors": [T0, tensor("b.weight", [32], 8, 260)]}, ("'b.weight'", "aligned to 32")),
    "overlap": ({"tensors": [T0, tensor("b.weight", [32], 8, 224)]}, ("'b.weight'", "overlaps", "'a.weight'")),
    "dims 2^42+1": ({"tensors": [tensor("a.weight", [32, 2**42 + 1], 0, 0)]}, ("'a.weight'",)),
    "dims wrap to 0 in 64 bits": ({"tensors": [tensor("a.weight", [2**32, 2**32], 0, 0)]}, ("'a.weight'",)),
    "dims wrap to little": ({"tensors": [tensor("a.weight", [2**63, 2, 3], 0, 0)]}, ("'a.weight'",)),
    "zero-size": ({"tensors": [tensor("a.weight", [32, 0], 0, 0)]}, ("'a.weight'", "zero-size")),
    "no dims": ({"tensors": [tensor("a.weight", [], 0, 0)]}, ("'a.weight'", "0 dimensions")),
    "2^32-1 dims": ({"tensors": [text("a") + struct.pack("<I", 2**32 - 1) + bytes(64)]}, ("'a'", "dimensions")),
    "half a block": ({"tensors": [tensor("a.weight", [48], 8, 0)]}, ("'a.weight'", "block of 32")),
    "unknown type": ({"tensors": [tensor("a.weight", [32], 77, 0)]}, ("'a.weight'", "unknown type 77")),
    "removed type": ({"tensors": [tensor("a.weight", [32], 4, 0)]}, ("'a.weight'", "unknown type 4")),
    "duplicate tensor": ({"tensors": [T0, tensor("a.weight", [32], 8, 256)]}, ("'a.weight'", "repeated")),
    "nameless tensor": ({"tensors": [tensor("", [32], 0, 0)]}, ("empty",)),
    "tensor name 2^40": ({"tensors": [struct.pack("<Q", 2**40) + bytes(64)]}, ("tensor 0",)),
    "duplicate key": ({"keys": [ARCH, ARCH]}, ("'general.architecture'", "repeated")),
    "key name 2^40": ({"keys": [struct.pack("<Q", 2**40) + bytes(64)]}, ("metadata key 0",)),
    "key not UTF-8": ({"keys": [key("k", 8, text("x")).replace(b"k", b"\xff")]}, ("UTF-8",)),
    "string length 2^40": ({"keys": [key("k", 8, struct.pack("<Q", 2**40))]}, ("'k'", str(2**40))),
    "string not UTF-8": ({"keys": [key("k", 8, text(b"\xff\xfe"))]}, ("'k'", "UTF-8")),
    "value type 13": ({"keys": [key("k", 13, bytes(8))]}, ("'k'", "value type 13")),
    "bool 2": ({"keys": [key("k", 7, b"\2")]}, ("'k'", "boolean")),
    "array count 2^61": ({"keys": [key("k", 9, struct.pack("<IQ", 4, 2**61))]}, ("'k'", "array elements")),
    "array count 2^64-1": ({"keys": [key("k", 9, struct.pack("<IQ", 0, 2**64 - 1))]}, ("'k'",)),
    "string count 2^63": ({"keys": [key("k", 9, struct.pack("<IQ", 8, 2**63))]}, ("'k'", "strings")),
    "string in array 2^40": ({"keys": [key("k", 9, struct.pack("<IQQ", 8, 1, 2**40))]}, ("'k'", "string 0")),
    "string in array not UTF-8": ({"keys": [key("k", 9, struct.pack("<IQ", 8, 1) + text(b"\x80"))]}, ("'k'", "UTF-8")),
    "nested array": ({"keys": [key("k", 9, struct.pack("<IQ", 9, 1))]}, ("'k'", "nested")),
    "scores as uint8": (
        {"keys": [key("tokenizer.ggml.scores", 9, struct.pack("<IQ4B", 0, 4, 1, 2, 3, 4))]},
        ("'tokenizer.ggml.scores'", "uint8", "float32"),
    ),
    "tokens as int32": (
        {"keys": [key("tokenizer.ggml.tokens", 9, struct.pack("<IQi", 5, 1, 1))]},
        ("'tokenizer.ggml.tokens'", "string"),
    ),
    "alignment 0": ({"keys": [key("general.alignment", 4, struct.pack("<I", 0))]}, ("alignment",)),
    "alignment 24": ({"keys": [key("general.alignment", 4, struct.pack("<I", 24))]}, ("alignment", "24")),
    "alignment text": ({"keys": [key("general.alignment", 8, text("32"))]}, ("alignment",)),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused(tmp_path: Path, lie: str) -> None:
    changes, words = LIES[lie]
    refused(write(tmp_path, **changes), *words)


def test_absent_and_unreadable(tmp_path: Path) -> None:
    for file in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(ModelFileError, match=str(file)):
            read_gguf(file)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    keys = [ARCH, key("t", 9, struct.pack("<IQ", 8, 2) + text("one") + text("two")), key("n", 4, bytes(4))]
    return write(tmp_path_factory.mktemp("small"), keys).read_bytes()


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_damage_reads_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, small: bytes, data: st.DataObject
) -> None:
    raw = bytearray(small)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 240))
        raw[at] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.getbasetemp() / "damaged.gguf"
    file.write_bytes(raw)
    try:
        g: GgufFile = read_gguf(file)
    except ModelFileError as e:
        assert str(file) in str(e)
        return
    for name, t in g.tensors.items():
        assert len(g.read(name)) == t.nbytes
