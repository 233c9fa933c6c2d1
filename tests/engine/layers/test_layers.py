"""Rotary tables against transformers' own; linear layers over several parts and ranks."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.layers.linear import ColumnLinear, Part, RowLinear
from engine.layers.rope_spec import RopeSpec
from engine.layers.rotary import inverse_frequencies, rotary
from engine.parallel.group import SoloGroup
from engine.quant.none import Unquantized

torch.set_num_threads(1)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "spec",
    [
        RopeSpec(500000.0, "linear", factor=2.5),
        RopeSpec(500000.0, "llama3", factor=8.0, original_max_position=8192),
        RopeSpec(10000.0, "llama3", factor=32.0, original_max_position=128, high_freq_factor=3.0),
        RopeSpec(10000.0, "yarn", factor=4.0, original_max_position=2048),
        RopeSpec(10000.0, "yarn", factor=8.0, original_max_position=256, attention_factor=1.3),
    ],
)
def test_scaled_frequencies_equal_transformers(spec):
    parameters = {
        "rope_type": spec.scaling,
        "rope_theta": spec.theta,
        "factor": spec.factor,
        "original_max_position_embeddings": spec.original_max_position,
        "low_freq_factor": spec.low_freq_factor,
        "high_freq_factor": spec.high_freq_factor,
    }
    if spec.attention_factor is not None:
        parameters["attention_factor"] = spec.attention_factor
    config = LlamaConfig(
        head_dim=64,
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=int(spec.original_max_position * spec.factor) or 4096,
        rope_parameters=parameters,
    )
    wanted, wanted_scale = ROPE_INIT_FUNCTIONS[spec.scaling](config, CPU)
    got, scale = inverse_frequencies(spec, 64)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)
    assert scale == pytest.approx(wanted_scale)


def test_table_divides_each_frequency():
    factors = tuple(float(i + 1) for i in range(8))
    plain, _ = inverse_frequencies(RopeSpec(), 16)
    got, _ = inverse_frequencies(RopeSpec(scaling="table", freq_factors=factors), 16)
    torch.testing.assert_close(got * torch.tensor(factors), plain)


def test_tables_are_per_position():
    tables = rotary(RopeSpec(), 16, 100, CPU)
    assert tables.cos.shape == tables.sin.shape == (100, 8)
    assert tables.cos.dtype == torch.float32
    torch.testing.assert_close(tables.cos[:, 0], torch.arange(100.0).cos())
    torch.testing.assert_close(tables.sin[0], torch.zeros(8))


class _Twice(SoloGroup):
    """Two ranks with equal partial sums."""

    size = 2

    def all_reduce(self, x):
        return 2 * x


def _part(out_features, in_features, bias=False):
    fmt = Unquantized(torch.float32)
    weight = torch.randn(out_features, in_features)
    return Part(fmt, fmt.finish({"weight": weight}), torch.randn(out_features) if bias else None), weight


def test_column_parts_are_concatenated_in_order():
    (a, wa), (b, wb) = _part(3, 4, bias=True), _part(5, 4)
    x = torch.randn(2, 4)
    expected = torch.cat([x @ wa.T + a.bias, x @ wb.T], dim=1)
    torch.testing.assert_close(ColumnLinear([a, b])(x), expected)


def test_row_sums_over_ranks():
    part, w = _part(3, 4)
    x = torch.randn(2, 4)
    torch.testing.assert_close(RowLinear(part, _Twice())(x), 2 * (x @ w.T))
