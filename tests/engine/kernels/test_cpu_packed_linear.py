from __future__ import annotations

import pytest
import torch
from helpers_packing import unpack

from engine.kernels import reference
from engine.kernels.cpu.packing import PackedWeight, pack_codes

SHAPES = [(1, 32), (31, 64), (33, 576), (70, 96), (96, 1536)]
ROWS = [1, 2, 3, 7, 13, 40]
CENTER = {4: 8, 8: 128}


def weight(out: int, features: int, bits: int, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """kind: symmetric (m = -center d), minima (any m), wide (values float16 cannot hold)."""
    codes = torch.randint(0, 2**bits, (out, features), dtype=torch.uint8)
    d = (torch.rand(out, features // 32) * 0.01 + 1e-3).half().float()
    if kind == "symmetric":
        return codes, d, -CENTER[bits] * d
    m = (-(2**bits) / 2 * d * (torch.rand_like(d) + 0.5)).half().float()
    return (codes, d, m) if kind == "minima" else (codes, d * 1.0001, m * 1.0001)


def error_bound(
    x: torch.Tensor, codes: torch.Tensor, d: torch.Tensor, m: torch.Tensor, most: int = 32767
) -> torch.Tensor:
    """Half a step of each group's activations, of 16 bits or 8, through |W|, plus float32 rounding once per group of
    terms of size (d code + |m|) |x|."""
    w = reference.dequantize(codes, d, m).abs()
    size = reference.dequantize(codes, d, m.abs())
    step = x.view(x.shape[0], -1, 32).abs().amax(-1) / most
    rounding = 2.0**-23 * (d.shape[1] + 8)
    return 0.5 * step.repeat_interleave(32, dim=1) @ w.T + rounding * (x.abs() @ size.T)


@pytest.mark.parametrize("kind", ["symmetric", "minima", "wide"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_close_to_float64(kernels, shape, bits, kind):
    stored = weight(*shape, bits, kind)
    packed = pack_codes(*stored, bits)
    wide = tuple(t.double() if t.is_floating_point() else t for t in stored)
    for rows in ROWS:
        x = torch.randn(rows, shape[1]) * torch.logspace(-3, 3, shape[1])
        error = (kernels.packed_linear(x, packed) - reference.packed_linear(x.double(), *wide)).abs()
        assert (error <= error_bound(x.double(), *wide)).all()


@pytest.mark.parametrize("kind", ["symmetric", "minima", "wide"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_narrow_activations_are_close_to_float64(kernels, native, shape, kind):
    stored = weight(*shape, 4, kind)
    packed = pack_codes(*stored, 4)
    wide = tuple(t.double() if t.is_floating_point() else t for t in stored)
    for rows in ROWS:
        x = torch.randn(rows, shape[1]) * torch.logspace(-3, 3, shape[1])
        y = kernels.packed_linear(x, packed, narrow=True)
        error = (y - reference.packed_linear(x.double(), *wide)).abs()
        assert (error <= error_bound(x.double(), *wide, most=127)).all()
        assert torch.equal(y, native.packed_linear(x, packed, narrow=True))
        assert torch.equal(y[-1:], kernels.packed_linear(x[-1:], packed, narrow=True))


def test_typical_error_of_narrow_activations(native):
    stored = weight(64, 576, 4, "symmetric")
    x = torch.randn(64, 576)
    want = reference.packed_linear(x.double(), *(t.double() if t.is_floating_point() else t for t in stored))
    error = native.packed_linear(x, pack_codes(*stored, 4), narrow=True) - want
    assert error.norm() / want.norm() < 8e-3


@pytest.mark.parametrize("bits", [4, 8])
def test_typical_error_is_small(native, bits):
    stored = weight(64, 576, bits, "symmetric")
    x = torch.randn(64, 576)
    want = reference.packed_linear(x.double(), *(t.double() if t.is_floating_point() else t for t in stored))
    error = native.packed_linear(x, pack_codes(*stored, bits)) - want
    assert error.norm() / want.norm() < 3e-5


@pytest.mark.parametrize("kind", ["symmetric", "minima", "wide"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unpack_is_the_inverse(shape, bits, kind):
    stored = weight(*shape, bits, kind)
    packed = pack_codes(*stored, bits)
    assert packed.half is (kind != "wide")
    assert (packed.center > 0) is (kind == "symmetric")
    assert all(torch.equal(a, b) for a, b in zip(unpack(packed), stored, strict=True))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_does_not_depend_on_the_others(kernels, threads):
    torch.set_num_threads(threads)
    packed = pack_codes(*weight(130, 576, 4, "minima"), 4)
    x = torch.randn(300, 576)
    whole = kernels.packed_linear(x, packed)
    for rows in ([0], [5, 6], range(100, 111), range(127, 260)):
        assert torch.equal(kernels.packed_linear(x[list(rows)], packed), whole[list(rows)])


@pytest.mark.parametrize("bits", [4, 8])
def test_every_build_gives_the_same_bits(kernels, native, bits):
    for kind in ("symmetric", "minima"):
        packed = pack_codes(*weight(70, 576, bits, kind), bits)
        x = torch.randn(40, 576)
        assert torch.equal(kernels.packed_linear(x, packed), native.packed_linear(x, packed))


def test_strided_rows(kernels):
    packed = pack_codes(*weight(48, 64, 4, "minima"), 4)
    x = torch.randn(5, 200)
    assert torch.equal(kernels.packed_linear(x[:, 16:80], packed), kernels.packed_linear(x[:, 16:80].clone(), packed))


def test_bias(kernels):
    packed, bias = pack_codes(*weight(49, 64, 4, "minima"), 4), torch.randn(49)
    x = torch.randn(5, 64)
    assert torch.equal(kernels.packed_linear(x, packed, bias), kernels.packed_linear(x, packed) + bias)


@pytest.mark.parametrize("kind", ["symmetric", "minima", "wide"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows(kernels, shape, bits, kind):
    codes, d, m = weight(*shape, bits, kind)
    ids = torch.cat([torch.arange(shape[0]).flip(0), torch.tensor([0, 0])])
    want = codes.view(shape[0], -1, 32).float() * d[..., None] + m[..., None]
    assert torch.equal(kernels.packed_rows(pack_codes(codes, d, m, bits), ids), want.flatten(1)[ids])


def test_a_row_that_does_not_exist_is_nan(kernels):
    packed = pack_codes(*weight(33, 64, 4, "minima"), 4)
    rows = kernels.packed_rows(packed, torch.tensor([33, 32, -1]))
    assert rows.isnan().all(1).tolist() == [True, False, True]


def test_no_rows(kernels):
    packed = pack_codes(*weight(48, 64, 4, "minima"), 4)
    assert kernels.packed_linear(torch.empty(0, 64), packed).shape == (0, 48)


@pytest.mark.parametrize("narrow", [False, True])
def test_zero_tiny_and_non_finite_activations(kernels, narrow):
    bits = 4 if narrow else 8
    packed = pack_codes(*weight(40, 96, bits, "symmetric"), bits)
    x = torch.randn(4, 96)
    x[0] = 0
    x[1] = 1e-38
    x[2, 50] = float("nan")
    x[3, 5] = float("inf")
    y = kernels.packed_linear(x, packed, narrow=narrow)
    assert (y[0] == 0).all()
    assert y[1].isfinite().all()
    assert y[2].isnan().all()
    assert not y[3].isfinite().any()


@pytest.mark.parametrize(("shape", "bits"), [((4, 33), 4), ((4, 64), 3)])
def test_pack_refuses(shape, bits):
    codes = torch.zeros(shape, dtype=torch.uint8)
    scale = torch.ones(shape[0], shape[1] // 32)
    with pytest.raises(ValueError, match=r"multiple of 32|4 or 8"):
        pack_codes(codes, scale, scale, bits)


def test_refuses_what_does_not_fit(native):
    packed: PackedWeight = pack_codes(*weight(48, 64, 4, "minima"), 4)
    with pytest.raises(ValueError, match="takes 64"):
        native.packed_linear(torch.randn(2, 96), packed)
    with pytest.raises(ValueError, match="float32"):
        native.packed_linear(torch.randn(2, 64, dtype=torch.bfloat16), packed)
    with pytest.raises(ValueError, match="48 output features"):
        native.packed_linear(torch.randn(2, 64), packed, torch.randn(47))
    eight = pack_codes(*weight(48, 64, 8, "minima"), 8)
    with pytest.raises(ValueError, match="narrow activations need a weight of 4 bits, got 8"):
        native.packed_linear(torch.randn(2, 64), eight, narrow=True)
    with pytest.raises(ValueError, match="int64"):
        native.packed_rows(packed, torch.tensor([1], dtype=torch.int32))
