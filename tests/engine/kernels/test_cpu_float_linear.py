from __future__ import annotations

import pytest
import torch
from helpers_packing import unpack_floats

from engine.kernels.cpu.float_packing import pack_floats

SHAPES = [(1, 1), (31, 64), (33, 75), (70, 96), (96, 1536)]
ROWS = [1, 2, 3, 7, 12, 13, 40]
TYPES = [torch.float32, torch.float16, torch.bfloat16]
each_type = pytest.mark.parametrize("dtype", TYPES, ids=str)


def weight(out: int, features: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(out, features).to(dtype)


def error_bound(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Float32 rounding once per term, and once more where a machine rounds the products of a pair apart."""
    return 2.0**-23 * (x.shape[1] + 8) * (x.double().abs() @ w.double().abs().T)


@pytest.mark.parametrize("rounded", [False, True])
@each_type
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_close_to_float64(kernels, shape, dtype, rounded):
    w = weight(*shape, dtype)
    packed = pack_floats(w)
    for rows in ROWS:
        x = torch.randn(rows, shape[1]) * torch.logspace(-3, 3, shape[1])
        taken = x.bfloat16().float() if rounded else x
        error = (kernels.float_linear(x, packed, rounded=rounded) - taken.double() @ w.double().T).abs()
        assert (error <= error_bound(taken, w)).all()


@each_type
def test_every_build_gives_the_same_bits_unrounded(kernels, native, dtype):
    packed, x = pack_floats(weight(70, 75, dtype)), torch.randn(15, 75)
    assert torch.equal(kernels.float_linear(x, packed), native.float_linear(x, packed))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "rounded"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_a_row_does_not_depend_on_the_others(kernels, threads, dtype, rounded):
    torch.set_num_threads(threads)
    packed, x = pack_floats(weight(130, 576, dtype)), torch.randn(300, 576)
    whole = kernels.float_linear(x, packed, rounded=rounded)
    for rows in ([0], [5, 6], range(100, 111), range(117, 260)):
        assert torch.equal(kernels.float_linear(x[list(rows)], packed, rounded=rounded), whole[list(rows)])


@each_type
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unpack_is_the_inverse(shape, dtype):
    w = weight(*shape, dtype)
    assert torch.equal(unpack_floats(pack_floats(w)), w)


@each_type
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows(kernels, shape, dtype):
    w = weight(*shape, dtype)
    ids = torch.cat([torch.arange(shape[0]).flip(0), torch.tensor([0, 0])])
    assert torch.equal(kernels.float_rows(pack_floats(w), ids), w.float()[ids])


def test_a_row_that_does_not_exist_is_nan(kernels):
    rows = kernels.float_rows(pack_floats(weight(33, 64, torch.bfloat16)), torch.tensor([33, 32, -1]))
    assert rows.isnan().all(1).tolist() == [True, False, True]


def test_rounds_to_the_nearest_even(kernels):
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 3.0e38, 1e-20])
    packed = pack_floats(torch.eye(6).bfloat16())
    got = kernels.float_linear(torch.diag(values), packed, rounded=True).diagonal()
    assert torch.equal(got, values.bfloat16().float())


@pytest.mark.parametrize("rounded", [False, True])
def test_strided_rows_and_bias(kernels, rounded):
    packed, bias, x = pack_floats(weight(49, 64, torch.bfloat16)), torch.randn(49), torch.randn(5, 200)
    part = x[:, 16:80]
    want = kernels.float_linear(part.clone(), packed, rounded=rounded) + bias
    assert torch.equal(kernels.float_linear(part, packed, bias, rounded), want)


@pytest.mark.parametrize("rounded", [False, True])
def test_non_finite_activations_poison_their_row_alone(kernels, rounded):
    packed, x = pack_floats(weight(40, 96, torch.bfloat16)), torch.randn(4, 96)
    x[1, 50], x[2, 5] = float("nan"), float("inf")
    y = kernels.float_linear(x, packed, rounded=rounded)
    assert y[[0, 3]].isfinite().all()
    assert y[1].isnan().all()
    assert not y[2].isfinite().any()


def test_no_rows(kernels):
    assert kernels.float_linear(torch.empty(0, 64), pack_floats(weight(48, 64, torch.float32))).shape == (0, 48)


def test_refuses_what_does_not_fit(native):
    packed = pack_floats(weight(48, 64, torch.bfloat16))
    with pytest.raises(ValueError, match="takes 64"):
        native.float_linear(torch.randn(2, 96), packed)
    with pytest.raises(ValueError, match="float32"):
        native.float_linear(torch.randn(2, 64, dtype=torch.bfloat16), packed)
    with pytest.raises(ValueError, match="48 output features"):
        native.float_linear(torch.randn(2, 64), packed, torch.randn(47))
    with pytest.raises(ValueError, match="int64"):
        native.float_rows(packed, torch.tensor([1], dtype=torch.int32))
    with pytest.raises(ValueError, match="float64"):
        pack_floats(torch.randn(2, 2, dtype=torch.float64))
