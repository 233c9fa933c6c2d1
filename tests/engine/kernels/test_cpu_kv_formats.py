"""The conversions in every build of the compiled kernels, to the bit."""

from __future__ import annotations

import pytest
import torch

from engine.attention.kv_codec import LARGEST, decode, encode
from engine.kernels.cpu.ops import PagedContext, Scoring
from engine.kv.storage import KVLayout, KVStorage

CPU = torch.device("cpu")


def any_floats(rows: int, dim: int) -> torch.Tensor:
    """Floats of any bits: subnormal, infinite, NaN; some rows of one magnitude, where codes lie close."""
    bits = torch.randint(-(2**31), 2**31, (rows, 1, dim), dtype=torch.int64).to(torch.int32).view(torch.float32)
    bits[::2] = torch.randn(len(bits[::2]), 1, dim)
    bits[::8] = torch.randint(-127, 128, bits[::8].shape).float() / 2  # ties
    return bits


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("by_feature", [False, True])
def test_writes_what_torch_would(kernels, dtype, by_feature):
    rows, dim = 320, 32
    kv = KVStorage(KVLayout(1, 1, dim, 16, dtype, by_feature), rows // 16, CPU).layers[0]
    k, v = any_floats(rows, dim), any_floats(rows, dim)
    context = PagedContext(
        torch.arange(rows),
        torch.tensor([0, rows]).int(),
        torch.tensor([rows]).int(),
        torch.arange(rows // 16).int().unsqueeze(0),
    )
    kernels.paged_attention(torch.zeros(rows, 1, dim), k, v, kv, context, Scoring(1.0))
    (kc, ks), (vc, vs) = encode(k, dtype), encode(v, dtype)
    for got, want in zip(kv, (kc, vc, ks, vs), strict=True):
        assert torch.equal(got.flatten().view(torch.uint8), want.flatten().view(torch.uint8))


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("by_feature", [False, True])
def test_reads_every_code(kernels, dtype, by_feature):
    """A context of one token is its own value: 254 codes or so, sixteen to a sequence."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    codes = codes[codes.float().isfinite() & (codes.float().abs() <= LARGEST[dtype])]
    values = torch.nn.functional.pad(codes.float(), (0, -len(codes) % 16)).view(-1, 1, 16)
    values[:, 0, 0] = LARGEST[dtype]  # so that the scale is 1
    count = len(values)
    kv = KVStorage(KVLayout(1, 1, 16, 16, dtype, by_feature), count, CPU).layers[0]
    context = PagedContext(
        torch.arange(count) * 16,
        torch.arange(count + 1).int(),
        torch.ones(count).int(),
        torch.arange(count).int().unsqueeze(1),
    )
    out = kernels.paged_attention(torch.ones(count, 1, 16), values, values, kv, context, Scoring(1.0))
    assert torch.equal(out, values.view(count, 16))
    assert torch.equal(decode(*encode(values, dtype)), values)


def test_refuses_a_narrow_cache_without_scales(native):
    k, v, ks, _ = KVStorage(KVLayout(1, 1, 16, 16, torch.int8), 1, CPU).layers[0]
    context = PagedContext(torch.tensor([0]), torch.tensor([0, 1]).int(), torch.ones(1).int(), torch.zeros(1, 1).int())
    q = torch.zeros(1, 1, 16)
    with pytest.raises(ValueError, match=r"needs torch.bfloat16 scales of K and V"):
        native.paged_attention(q, q, q, (k, v), context, Scoring(1.0))
    with pytest.raises(ValueError, match=r"needs torch.bfloat16 scales of K and V"):
        native.paged_attention(q, q, q, (k, v, ks, ks.float()), context, Scoring(1.0))
