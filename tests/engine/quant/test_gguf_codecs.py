from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.errors import ModelFileError
from engine.quant.gguf_codecs import CODECS, codec, decode, to_float


def random_blocks(name: str, rows: int, blocks: int) -> torch.Tensor:
    """Random bytes whose float16 fields are ordinary numbers: the top exponent bit of every odd byte pair
    could make them infinite, so bytes are redrawn until gguf's own values are all finite and moderate."""
    rng = np.random.default_rng(sum(name.encode()))
    kind = GGMLQuantizationType[name.upper()]
    raw = rng.integers(0, 256, (rows * blocks, codec(name).block_bytes), dtype=np.uint8)
    while True:
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(raw, kind)
        bad = ~(np.isfinite(values) & (np.abs(values) < 1e6)).all(1)
        if not bad.any():
            return torch.from_numpy(raw.reshape(rows, blocks, -1))
        raw[bad] = rng.integers(0, 256, (int(bad.sum()), raw.shape[1]), dtype=np.uint8)


def reference(name: str, blocks: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(blocks.flatten(-2).numpy(), GGMLQuantizationType[name.upper()]))


@pytest.mark.parametrize("name", CODECS)
def test_values_are_ggufs(name: str) -> None:
    blocks = random_blocks(name, 7, 3)
    got = to_float(name, blocks)
    assert got.dtype is torch.float32
    assert torch.equal(got, reference(name, blocks))


@pytest.mark.parametrize("name", [n for n, c in CODECS.items() if c.decode])
def test_codes_mean_the_same_values(name: str) -> None:
    blocks = random_blocks(name, 7, 3)
    c = decode(name, blocks)
    features = 3 * codec(name).block
    assert (c.codes.dtype, c.d.dtype, c.m.dtype) == (torch.uint8, torch.float32, torch.float32)
    assert c.codes.shape == (7, features)
    assert c.d.shape == c.m.shape == (7, features // 32)
    assert c.bits in (4, 8) and int(c.codes.max()) < 2**c.bits
    value = c.d.repeat_interleave(32, 1) * c.codes + c.m.repeat_interleave(32, 1)
    assert torch.equal(value, reference(name, blocks))


def test_known_blocks_by_hand() -> None:
    half = np.float16(0.5).tobytes()
    q4_0 = torch.frombuffer(bytearray(half + bytes([0x80 + i for i in range(16)])), dtype=torch.uint8)
    got = to_float("q4_0", q4_0.view(1, 1, 18))[0]
    assert got.tolist() == [0.5 * (i - 8) for i in range(16)] + [0.0] * 16
    q8_0 = torch.frombuffer(bytearray(half + bytes([255, 128, 127, 0] * 8)), dtype=torch.uint8)
    assert to_float("q8_0", q8_0.view(1, 1, 34))[0, :4].tolist() == [-0.5, -64.0, 63.5, 0.0]


@pytest.mark.parametrize("name", CODECS)
def test_any_leading_shape_and_views(name: str) -> None:
    """Rows looked up singly or in a batch, and slices of the block axis, mean the same as the whole."""
    blocks = random_blocks(name, 6, 4)
    whole = to_float(name, blocks)
    assert torch.equal(to_float(name, blocks[torch.tensor([5, 0, 5])]), whole[[5, 0, 5]])
    block = codec(name).block
    assert torch.equal(to_float(name, blocks.narrow(1, 1, 2)), whole[:, block : 3 * block])


def test_sizes_and_refusals() -> None:
    for name, c in CODECS.items():
        assert (c.block, c.block_bytes) == GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
    with pytest.raises(ModelFileError, match=r"'q9_9'.*q4_0"):
        codec("q9_9")
    with pytest.raises(ModelFileError, match="q6_k"):
        decode("q6_k", random_blocks("q6_k", 1, 1))
