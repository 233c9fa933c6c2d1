"""The narrow cache formats against a search through every code that there is."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.kv_codec import LARGEST, decode, encode

FORMATS = list(LARGEST)
ERROR = {torch.int8: 0.5 / 127 + 2**-8, torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3}  # of the largest value


def codes_of(dtype: torch.dtype) -> torch.Tensor:
    """Every finite value, ascending, evens first where two are equal (0 and -0)."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return every[every.isfinite() & (every.abs() <= LARGEST[dtype])].unique()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@given(values=st.lists(st.floats(-2.0, 2.0, width=32), min_size=1, max_size=16))
def test_each_code_is_the_nearest_and_of_two_the_even_one(dtype, values):
    x = torch.tensor(values)
    codes, scale = encode(x, dtype)
    table = codes_of(dtype).double()
    if scale == 0:
        assert not codes.float().any()
        return
    exact = (x / scale.float()).double()  # the quotient is rounded to float32 first
    for got, want in zip(codes, exact.clamp(table[0], table[-1]), strict=True):
        distance = (table - want).abs()
        nearest = table[distance == distance.min()]
        assert got.double() in nearest
        if len(nearest) == 2:
            assert got.view(torch.uint8) % 2 == 0


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_error_is_bounded_by_the_heads_own_largest_value(dtype):
    x = torch.randn(200, 3, 64) * torch.logspace(-6, 6, 200).view(-1, 1, 1)
    codes, scales = encode(x, dtype)
    assert codes.shape == x.shape and scales.shape == x.shape[:-1]
    error = (decode(codes, scales) - x).abs().amax(-1)
    assert (error <= x.abs().amax(-1) * ERROR[dtype]).all()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_no_code_is_nan_and_no_head_spoils_another(dtype):
    x = torch.ones(6, 16)
    x[0] = math.nan
    x[1, 3], x[2, 5], x[3] = math.inf, -math.inf, 0.0
    x[4] *= 1e-45
    codes, scales = encode(x, dtype)
    back = decode(codes, scales)
    assert back.isfinite().all() and scales.isfinite().all()
    assert not back[0].any() and not back[3].any()
    assert back[1, 3] > 1e38 and back[2, 5] < -1e38
    torch.testing.assert_close(back[5], x[5], rtol=2**-8, atol=0)
