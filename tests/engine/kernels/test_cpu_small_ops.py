from __future__ import annotations

import pytest
import torch

from engine.errors import ConfigError
from engine.kernels import select_kernels
from engine.kernels.cpu.ops import NativeKernels
from engine.kernels.reference import TorchKernels

ORACLE = TorchKernels()
SHAPES = [(1, 576), (3, 17), (33, 1000), (70, 64), (2, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(kernels, shape):
    x = torch.randn(shape[0], shape[1] + 5)[:, : shape[1]] * 3
    w = torch.randn(shape[1])
    want = ORACLE.rms_norm(x.double(), w.double(), 1e-5)
    torch.testing.assert_close(kernels.rms_norm(x, w, 1e-5).double(), want, rtol=1e-6, atol=1e-6)


def test_rms_norm_of_heads(kernels):
    x, w = torch.randn(5, 7, 48)[:, 1:5], torch.randn(48)
    want = kernels.rms_norm(x.reshape(20, 48), w, 1e-5).view(5, 4, 48)
    assert torch.equal(kernels.rms_norm(x, w, 1e-5), want)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_add(kernels, shape):
    x, residual, w = torch.randn(shape), torch.randn(shape), torch.randn(shape[1])
    want, want_sum = ORACLE.rms_norm_add(x.double(), residual.double(), w.double(), 1e-5)
    got, got_sum = kernels.rms_norm_add(x, residual, w, 1e-5)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got_sum.double(), want_sum, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_silu_mul(kernels, shape):
    x = torch.randn(shape[0], 2 * shape[1]) * 20
    torch.testing.assert_close(kernels.silu_mul(x).double(), ORACLE.silu_mul(x.double()), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gelu_mul(kernels, shape):
    x = torch.randn(shape[0], 2 * shape[1]) * 4
    torch.testing.assert_close(kernels.gelu_mul(x).double(), ORACLE.gelu_mul(x.double()), rtol=2e-6, atol=2e-6)
    far = torch.tensor([[30.0, -30.0, 2.0, 2.0]])
    assert kernels.gelu_mul(far)[0, 0] == 60 and kernels.gelu_mul(far)[0, 1].abs() < 1e-30


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scale_and_softcap_in_place_of_some_columns(kernels, shape):
    whole = torch.randn(shape[0], shape[1] + 5) * 60
    x, rest = whole[:, : shape[1]], whole[:, shape[1] :].clone()
    want = x.double() * 0.3
    kernels.scale(x, 0.3)
    torch.testing.assert_close(x.double(), want, rtol=1e-6, atol=0)
    want = x.double()
    ORACLE.softcap(want, 30.0)
    kernels.softcap(x, 30.0)
    torch.testing.assert_close(x.double(), want, rtol=1e-6, atol=0)
    assert torch.equal(whole[:, shape[1] :], rest)


def test_softcap_is_relatively_exact_from_tiny_to_huge(kernels):
    x = torch.cat([torch.linspace(-30, 30, 4001), 10.0 ** torch.linspace(-30, 8, 400), torch.tensor([torch.nan])])
    got = x.clone().unsqueeze(0)
    kernels.softcap(got, 1.0)
    torch.testing.assert_close(got[0].double(), x.double().tanh(), rtol=1e-6, atol=0, equal_nan=True)
    assert got[0].nan_to_num().abs().max() <= 1


def test_silu_mul_keeps_nan(kernels):
    x = torch.tensor([[float("nan"), 100.0, -100.0, 2.0, 1.0, 1.0, 1.0, 1.0]])
    y = kernels.silu_mul(x)
    assert y[0, 0].isnan()
    assert y[0, 1] == 100 and y[0, 2].abs() < 1e-30


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotated"), [(9, 3, 64, 64), (5, 1, 24, 20), (2, 2, 128, 64)])
def test_rope_in_views_of_one_buffer(kernels, heads, kv_heads, dim, rotated):
    positions = torch.randint(0, 100, (21,))
    cos, sin = torch.randn(100, rotated // 2), torch.randn(100, rotated // 2)
    buffer = torch.randn(21, heads + 2 * kv_heads, dim)
    want = buffer.double()
    ORACLE.rope(want[:, :heads], want[:, heads:-kv_heads], cos.double(), sin.double(), positions)
    kernels.rope(buffer[:, :heads], buffer[:, heads:-kv_heads], cos, sin, positions)
    torch.testing.assert_close(buffer.double(), want, rtol=1e-6, atol=1e-6)
    assert torch.equal(buffer[:, -kv_heads:].double(), want[:, -kv_heads:])


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_does_not_depend_on_the_others(kernels, threads):
    torch.set_num_threads(threads)
    x, w = torch.randn(200, 576), torch.randn(576)
    assert torch.equal(kernels.rms_norm(x, w, 1e-5)[50:52], kernels.rms_norm(x[50:52], w, 1e-5))
    assert torch.equal(kernels.silu_mul(x)[50:52], kernels.silu_mul(x[50:52]))
    assert torch.equal(kernels.gelu_mul(x)[50:52], kernels.gelu_mul(x[50:52]))


def test_every_build_gives_the_same_bits(kernels, native):
    x, w = torch.randn(7, 576) * 5, torch.randn(576)
    assert torch.equal(kernels.rms_norm(x, w, 1e-5), native.rms_norm(x, w, 1e-5))
    assert torch.equal(kernels.silu_mul(x), native.silu_mul(x))
    assert torch.equal(kernels.gelu_mul(x), native.gelu_mul(x))
    capped = x.clone(), x.clone()
    kernels.softcap(capped[0], 2.0)
    native.softcap(capped[1], 2.0)
    assert torch.equal(*capped)


def test_selection(native):
    cpu = torch.device("cpu")
    assert isinstance(select_kernels(cpu, torch.float32), NativeKernels)
    assert isinstance(select_kernels(cpu, torch.bfloat16), TorchKernels)
    assert isinstance(select_kernels(cpu, torch.float32, "torch"), TorchKernels)
    assert isinstance(select_kernels(torch.device("cuda"), torch.float32), TorchKernels)
    with pytest.raises(ConfigError, match="float32"):
        select_kernels(cpu, torch.bfloat16, "cpu_native")
    with pytest.raises(ValueError, match="known: cpu_native, torch"):
        select_kernels(cpu, torch.float32, "nonsense")


def test_refuses_what_does_not_fit(native):
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match="disagree"):
        native.rms_norm(x, torch.ones(7), 1e-5)
    with pytest.raises(ValueError, match="unit last stride"):
        native.silu_mul(x.T)
    with pytest.raises(ValueError, match="positions"):
        q = x.view(2, 1, 8)
        native.rope(q, q, torch.ones(9, 4), torch.ones(9, 4), torch.zeros(2, dtype=torch.int32))


@pytest.mark.parametrize("rows", [0, 1, 5, 300])
def test_side_by_side(kernels, rows):
    parts = [torch.randn(rows, 40)[:, 3:20], torch.randn(rows, 64), torch.randn(rows, 1)]
    assert torch.equal(kernels.side_by_side(parts), torch.cat(parts, dim=1))


def test_side_by_side_refuses_other_rows(native):
    with pytest.raises(ValueError, match="3 and 4 rows"):
        native.side_by_side([torch.randn(3, 2), torch.randn(4, 2)])
