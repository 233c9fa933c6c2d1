"""Activations of 8 bits beside weights of 4."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from engine.batch import build_batch
from engine.config import EngineConfig
from engine.executor.rank import Rank
from engine.kernels import cpu
from engine.kernels.cpu.ops import NativeKernels
from engine.quant.gguf import Gguf
from engine.types import SeqSlice
from tests.helpers_models import make_gguf

FEATURES = 576


@pytest.fixture(autouse=True)
def needs_kernels():
    if not cpu.available():
        pytest.skip("no C++ compiler")
    torch.set_num_threads(1)
    torch.manual_seed(0)


def _stored(kind: str) -> dict[str, torch.Tensor]:
    spec = Gguf(kind, torch.float32, None).params(FEATURES, 96)["blocks"]
    blocks = torch.randint(0, 256, spec.shape, dtype=torch.uint8)
    blocks[..., :2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    if kind == "q4_1":
        blocks[..., 2:4] = torch.tensor([-0.08], dtype=torch.float16).view(torch.uint8)
    return {"blocks": blocks}


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0"])
def test_only_four_bits_are_multiplied_narrowly(kind):
    native, stored = NativeKernels(), _stored(kind)
    wide, narrow = (Gguf(kind, torch.float32, native, n) for n in (False, True))
    x, ready = torch.randn(20, FEATURES), wide.finish(stored)
    got, want = narrow.apply(x, ready), functional.linear(x, wide.dequantize(stored))
    assert torch.equal(got, wide.apply(x, ready)) is (kind == "q8_0")
    assert (got - want).abs().max() <= 0.02 * want.abs().max()


def test_bfloat16_asked_for_is_narrow_and_nothing_else_is(tmp_path):
    path = str(make_gguf(tmp_path))
    hidden = {}
    for dtype in ("auto", "float32", "bfloat16"):
        config = EngineConfig(model=path, dtype=dtype, kv_cache_dtype="float32", num_kv_blocks=8, num_threads=1)
        rank = Rank(config)
        rank.load()
        batch = build_batch([SeqSlice(0, tuple(range(5, 25)), 0, (0, 1), sample=True)], 16, torch.device("cpu"))
        with torch.inference_mode():
            hidden[dtype] = rank.runner.model.forward(batch, rank.runner.storage.layers)
    assert torch.equal(hidden["auto"], hidden["float32"])
    assert not torch.equal(hidden["auto"], hidden["bfloat16"])
    assert functional.cosine_similarity(hidden["auto"], hidden["bfloat16"]).min() > 0.99
