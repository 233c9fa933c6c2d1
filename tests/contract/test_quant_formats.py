"""What every quantization format promises. A new format needs one entry in SAMPLES: how to store a float
weight in each of its kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from helpers_models import hf_model, make_gguf, make_hf_dir
from torch import Tensor
from torch.nn import functional

from engine.errors import ConfigError
from engine.kernels import cpu
from engine.kernels.cpu.ops import NativeKernels
from engine.models.checkpoint import open_checkpoint
from engine.parallel.sharding import features, rank_range
from engine.quant.base import QuantFormat, fuse
from engine.quant.formats import format_for
from engine.quant.gguf import Gguf
from engine.quant.gguf_codecs import CODECS
from engine.quant.none import Unquantized

OUT, IN = 24, 1536
NATIVE = NativeKernels() if cpu.available() else None


@dataclass(frozen=True)
class Sample:
    """`error`: how far the stored weight may be from the float one, relative to its largest value."""

    label: str
    format: QuantFormat
    store: Callable[[Tensor], dict[str, Tensor]]
    error: float

    def __str__(self) -> str:
        return self.label


def none_samples() -> Iterator[Sample]:
    for dtype, error in ((torch.float32, 0.0), (torch.float16, 2**-11), (torch.bfloat16, 2**-8)):
        for native in (None, NATIVE) if NATIVE else (None,):
            label = f"none-{dtype}{'-native' if native else ''}"
            fmt = format_for("none", torch.float32, native)
            yield Sample(label, fmt, lambda w, d=dtype: {"weight": w.to(d)}, error)


def gguf_samples() -> Iterator[Sample]:
    errors = {"q4_0": 0.15, "q4_1": 0.1, "q5_0": 0.08, "q5_1": 0.05, "q8_0": 0.01}
    for kind in CODECS:
        qtype = gguf.GGMLQuantizationType[kind.upper()]

        def store(w: Tensor, kind: str = kind, qtype: gguf.GGMLQuantizationType = qtype) -> dict[str, Tensor]:
            codec = CODECS[kind]
            shape = (w.shape[0], w.shape[1] // codec.block, codec.block_bytes)
            try:
                raw = gguf.quants.quantize(w.numpy(), qtype)
            except NotImplementedError:  # no encoder: any bytes with tame scales will do
                rng = np.random.default_rng(w.shape[0])
                raw = rng.integers(0, 48, shape, dtype=np.uint8)  # float16 below 2: no infinities
            return {"blocks": torch.from_numpy(raw.reshape(shape).copy())}

        for native in (None, NATIVE) if NATIVE else (None,):
            label = f"gguf-{kind}{'-native' if native else ''}"
            yield Sample(label, format_for(kind, torch.float32, native), store, errors.get(kind, float("inf")))


SAMPLES: dict[str, Callable[[], Iterator[Sample]]] = {"none": none_samples, "gguf": gguf_samples}
ALL = [sample for make in SAMPLES.values() for sample in make()]
each_sample = pytest.mark.parametrize("sample", ALL, ids=str)


@pytest.fixture(autouse=True)
def surroundings() -> None:
    torch.set_num_threads(1)


def weight(out: int = OUT, inp: int = IN, seed: int = 0) -> Tensor:
    return torch.randn(out, inp, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    assert (got - want).abs().max() <= tolerance * want.abs().max()


def test_every_format_has_samples() -> None:
    formats = {"none": Unquantized, "gguf": Gguf}
    assert set(SAMPLES) == set(formats)
    for name, make in SAMPLES.items():
        assert all(isinstance(s.format, formats[name]) for s in make())


@each_sample
def test_params_describe_what_is_stored(sample: Sample) -> None:
    stored = sample.store(weight())
    specs = sample.format.params(IN, OUT)
    assert specs.keys() == stored.keys()
    for name, spec in specs.items():
        assert tuple(stored[name].shape) == spec.shape
        if spec.out is not None:
            assert stored[name].shape[spec.out.dim] * spec.out.unit == OUT
        if spec.inp is not None:
            assert stored[name].shape[spec.inp.dim] * spec.inp.unit == IN


@each_sample
def test_dequantized_is_the_weight_within_the_formats_error(sample: Sample) -> None:
    w = weight()
    got = sample.format.dequantize(sample.store(w))
    assert got.dtype is torch.float32 and got.shape == w.shape
    assert torch.isfinite(got).all()
    assert (got - w).abs().max() <= sample.error * w.abs().max()


@each_sample
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 33])
def test_apply_is_the_product_with_the_dequantized_weight(sample: Sample, num_tokens: int) -> None:
    stored = sample.store(weight())
    x = weight(num_tokens, seed=1)
    bias = weight(1, OUT, seed=2)[0]
    w = sample.format.dequantize(stored)
    ready = sample.format.finish(stored)
    close(sample.format.apply(x, ready), functional.linear(x, w), sample.format.tolerance)
    close(sample.format.apply(x, ready, bias), functional.linear(x, w, bias), sample.format.tolerance)
    assert torch.equal(x, weight(num_tokens, seed=1))


@each_sample
def test_rows_are_the_dequantized_weights_rows(sample: Sample) -> None:
    stored = sample.store(weight())
    ids = torch.tensor([3, OUT - 1, 3, 0])
    assert torch.equal(sample.format.rows(sample.format.finish(stored), ids), sample.format.dequantize(stored)[ids])


@each_sample
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("split", ["column", "row"])
def test_ranks_together_give_the_whole_result(sample: Sample, size: int, split: str) -> None:
    stored, x = sample.store(weight()), weight(3, seed=1)
    specs = sample.format.params(IN, OUT)
    want = functional.linear(x, sample.format.dequantize(stored))
    parts = []
    for rank in range(size):
        start, length = rank_range(OUT if split == "column" else IN, rank, size, "features")
        mine = {n: features(t, specs[n], split, start, length) for n, t in stored.items()}  # type: ignore[arg-type]
        local = x if split == "column" else x[:, start : start + length]
        parts.append(sample.format.apply(local, sample.format.finish(mine)))
    got = torch.cat(parts, -1) if split == "column" else torch.stack(parts).sum(0)
    close(got, want, sample.format.tolerance)


@each_sample
def test_a_row_split_never_cuts_a_unit(sample: Sample) -> None:
    stored = sample.store(weight())
    for name, spec in sample.format.params(IN, OUT).items():
        if spec.inp is not None and spec.inp.unit > 1:
            with pytest.raises(ConfigError, match=str(spec.inp.unit)):
                features(stored[name], spec, "row", 0, spec.inp.unit // 2)


@each_sample
def test_fused_layers_are_their_parts_side_by_side(sample: Sample) -> None:
    parts = [sample.store(weight(out, seed=out)) for out in (8, 16, 8)]
    fused = fuse(sample.format.params(IN, 8), parts)
    x = weight(2, seed=1)
    want = torch.cat([functional.linear(x, sample.format.dequantize(p)) for p in parts], -1)
    close(sample.format.apply(x, sample.format.finish(fused)), want, sample.format.tolerance)


@each_sample
def test_compute_dtype_is_the_inputs(sample: Sample) -> None:
    kind = "none" if "blocks" not in sample.store(weight(1)) else sample.label.split("-")[1]
    fmt = format_for(kind, torch.bfloat16, NATIVE if sample.label.endswith("native") else None)
    stored = sample.store(weight())
    x = weight(2, seed=1).bfloat16()
    got = fmt.apply(x, fmt.finish(stored))
    assert got.dtype is torch.bfloat16
    close(got.float(), functional.linear(x.float(), fmt.dequantize(stored)), 0.03)
    assert fmt.rows(fmt.finish(stored), torch.tensor([1])).dtype is torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hf", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "BF16"])
def test_checkpoint_round_trip(tmp_path: Path, kind: str) -> None:
    path = make_hf_dir(tmp_path) if kind == "hf" else make_gguf(tmp_path, quant=kind)
    checkpoint = open_checkpoint(path)
    model = hf_model("llama").state_dict()
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        loaded = checkpoint.load(name)
        fmt = format_for(loaded.format, torch.float32, None)
        (only,) = fmt.params(loaded.shape[1], loaded.shape[0])
        w = fmt.dequantize({only: loaded.data})
        limit = {"hf": 0.0, "BF16": 2**-8, "Q8_0": 0.01}.get(kind, 0.15)
        assert (w - model[name]).abs().max() <= limit * model[name].abs().max()
