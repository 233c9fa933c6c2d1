from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_models import hf_model, make_hf_dir
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelFileError
from engine.models.safetensors_dir import read_header, read_json, read_safetensors

A = {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}
B = {"dtype": "BF16", "shape": [3], "data_offsets": [32, 38]}


def write(file: Path, header: Any, data: int = 38, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + bytes(range(data)))
    return file


def refused(file: Path, *words: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError) as e:
            read_header(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    for word in (str(file), *words):
        assert word in str(e.value)


def test_header(tmp_path: Path) -> None:
    file = write(tmp_path / "m.safetensors", {"__metadata__": {"format": "pt"}, "b": B, "a": A})
    entries = read_header(file)
    assert {n: (e.dtype, e.shape) for n, e in entries.items()} == {"b": ("BF16", (3,)), "a": ("F32", (4, 2))}


LIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "header length 2^60": ({"header": {"a": A, "b": B}, "length": 2**60}, (str(2**60),)),
    "header one byte longer than the file": ({"header": {}, "data": 0, "length": 3}, ("header",)),
    "not JSON": ({"header": b"{not json}"}, ("JSON",)),
    "not UTF-8": ({"header": b"\xff\xfe{}"}, ("JSON",)),
    "a list": ({"header": [1]}, ("not a JSON object",)),
    "deep nesting": ({"header": b"[" * 200_000}, ("JSON",)),
    "overlap": ({"header": {"a": A, "b": {**B, "data_offsets": [28, 34]}}}, ("'b'", "overlaps", "'a'")),
    "gap": ({"header": {"a": A, "b": {**B, "data_offsets": [34, 40]}}, "data": 40}, ("'b'", "gap")),
    "past the end": ({"header": {"a": A, "b": B}, "data": 37}, ("'b'", "truncated")),
    "bytes left over": ({"header": {"a": A}}, ("belong to no tensor",)),
    "shape too large": ({"header": {"a": {**A, "shape": [4, 3]}, "b": B}}, ("'a'", "48", "32")),
    "dtype of another size": ({"header": {"a": {**A, "dtype": "F64"}, "b": B}}, ("'a'", "64")),
    "dims 2^42+1": ({"header": {"a": {**A, "shape": [2**42 + 1, 2]}}}, ("'a'",)),
    "negative dims": ({"header": {"a": {**A, "shape": [-4, -2]}}}, ("'a'", "shape")),
    "fractional offset": ({"header": {"a": {**A, "data_offsets": [0, 32.0]}}}, ("'a'", "data_offsets")),
    "offsets reversed": ({"header": {"a": {**A, "data_offsets": [32, 0]}}}, ("'a'", "data_offsets")),
    "unknown dtype": ({"header": {"a": {**A, "dtype": "F7"}}}, ("'a'", "F7")),
    "no shape": ({"header": {"a": {"dtype": "F32", "data_offsets": [0, 32]}}}, ("'a'", "shape")),
    "entry is text": ({"header": {"a": "x"}}, ("'a'",)),
    "same name twice": (
        {"header": b'{"a": %b, "a": %b}' % (json.dumps(A).encode(), json.dumps(A).encode()), "data": 32},
        ("repeated",),
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused(tmp_path: Path, lie: str) -> None:
    changes, words = LIES[lie]
    refused(write(tmp_path / "m.safetensors", **changes), *words)


@pytest.mark.parametrize("size", range(0, 160, 3))
def test_every_truncation_is_refused(tmp_path: Path, size: int) -> None:
    file = write(tmp_path / "m.safetensors", {"a": A, "b": B})
    whole = file.read_bytes()
    assert size < len(whole)
    file.write_bytes(whole[:size])
    refused(file)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 140), st.integers(0, 255)), min_size=1, max_size=4))
def test_any_damage_reads_or_is_refused(tmp_path_factory: pytest.TempPathFactory, hits: list[tuple[int, int]]) -> None:
    file = write(tmp_path_factory.getbasetemp() / "damaged.safetensors", {"a": A, "b": B})
    raw = bytearray(file.read_bytes())
    for at, value in hits:
        raw[at] = value
    file.write_bytes(raw)
    try:
        read_header(file)
    except ModelFileError as e:
        assert str(file) in str(e)


@pytest.mark.parametrize("shard_size", ["5GB", "100KB"])
def test_reads_every_tensor(tmp_path: Path, shard_size: str) -> None:
    found = read_safetensors(make_hf_dir(tmp_path, "llama", shard_size=shard_size))
    assert len(found.files) == (1 if shard_size == "5GB" else 7)
    want = hf_model("llama").state_dict()
    assert found.tensors.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(found.read(name), tensor)
    with pytest.raises(ModelFileError, match="'nothing'"):
        found.read("nothing")


def test_shards_and_index_must_agree(tmp_path: Path) -> None:
    def fresh() -> tuple[Path, Path, dict[str, Any]]:
        path = make_hf_dir(tmp_path, "llama", shard_size="100KB")
        index = path / "model.safetensors.index.json"
        return path, index, json.loads(index.read_text())

    def fails(path: Path, *words: str) -> None:
        with pytest.raises(ModelFileError) as e:
            read_safetensors(path)
        for word in words:
            assert word in str(e.value)

    path, index, content = fresh()
    shard = content["weight_map"]["model.norm.weight"]
    whole = (path / shard).read_bytes()
    (path / shard).write_bytes(whole[:-1000])
    fails(path, shard, "tensor", "truncated")
    (path / shard).unlink()
    fails(path, shard, "absent")

    path, index, content = fresh()
    content["weight_map"]["model.extra.weight"] = shard
    index.write_text(json.dumps(content))
    fails(path, shard, "'model.extra.weight'", "missing")

    path, index, content = fresh()
    del content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    fails(path, shard, "'model.norm.weight'")

    path, index, content = fresh()
    content["weight_map"]["model.norm.weight"] = "../" + shard
    index.write_text(json.dumps(content))
    fails(path, "plain file name")

    for bad in ("{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'):
        index.write_text(bad)
        fails(path, str(index))
    index.unlink()
    fails(path, str(path), "model.safetensors")


def test_a_file_that_changes_after_opening_is_an_error_of_ours(tmp_path: Path) -> None:
    path = make_hf_dir(tmp_path, "llama")
    found = read_safetensors(path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelFileError, match=r"model\.safetensors: tensor 'model\.norm\.weight'"):
        found.read("model.norm.weight")


def test_read_json(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    for bad in (b"", b"[1]", b"{", b"\xff", b"[" * 100_000):
        file.write_bytes(bad)
        with pytest.raises(ModelFileError, match=r"c\.json"):
            read_json(file)
    with pytest.raises(ModelFileError, match=r"absent\.json"):
        read_json(tmp_path / "absent.json")
    file.write_bytes(b'{"a": 1}')
    assert read_json(file) == {"a": 1}
