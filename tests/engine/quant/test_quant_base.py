from __future__ import annotations

import pytest
import torch

from engine.errors import ModelFileError
from engine.kernels import cpu
from engine.kernels.cpu.ops import NativeKernels
from engine.quant.base import Axis, ParamSpec, fuse
from engine.quant.formats import format_for
from engine.quant.gguf import Gguf
from engine.quant.none import Unquantized


def test_format_for() -> None:
    assert isinstance(format_for("none", torch.float32, None), Unquantized)
    q = format_for("q4_1", torch.bfloat16, None)
    assert isinstance(q, Gguf) and q.kind == "q4_1" and q.dtype is torch.bfloat16
    with pytest.raises(ModelFileError, match="q9_9"):
        format_for("q9_9", torch.float32, None)


def test_params_refuse_what_blocks_cannot_hold() -> None:
    assert Gguf("q4_1", torch.float32, None).params(64, 3)["blocks"].shape == (3, 2, 20)
    with pytest.raises(ModelFileError, match="block of 256"):
        Gguf("q4_k", torch.float32, None).params(576, 3)


def test_rows_in_the_compute_dtype() -> None:
    table = torch.randn(5, 4)
    fmt = Unquantized(torch.bfloat16)
    got = fmt.rows(fmt.finish({"weight": table}), torch.tensor([4, 4, 0]))
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, table[[4, 4, 0]].bfloat16())


def test_finish_shares_memory_when_nothing_changes() -> None:
    weight = torch.randn(3, 4)
    assert Unquantized(torch.float32).finish({"weight": weight})["weight"] is weight


@pytest.mark.parametrize(
    ("stored", "wanted", "kept"),
    [
        (torch.bfloat16, torch.float32, torch.bfloat16),  # float32 would hold the same values
        (torch.float16, torch.float32, torch.float16),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float16, torch.float16),
    ],
)
def test_what_the_kernels_keep_of_a_float_weight(stored: torch.dtype, wanted: torch.dtype, kept: torch.dtype) -> None:
    if not cpu.available():
        pytest.skip("no C++ compiler")
    weight = torch.randn(3, 4).to(stored)
    fmt = Unquantized(torch.float32, NativeKernels(), wanted)
    ready = fmt.finish({"weight": weight})
    assert ready["weight"].data.dtype is kept
    assert torch.equal(fmt.rows(ready, torch.tensor([2, 0])), weight[[2, 0]].to(kept).float())
    x = torch.randn(2, 4)
    taken = x.bfloat16().float() if wanted is torch.bfloat16 else x
    torch.testing.assert_close(fmt.apply(x, ready), taken @ weight.to(kept).float().T)


def test_fuse_stacks_outputs_and_keeps_what_has_none() -> None:
    specs = {"w": ParamSpec((2, 3), torch.float32, out=Axis(0)), "s": ParamSpec((), torch.float32)}
    a, b = ({"w": torch.full((n, 3), float(n)), "s": torch.tensor(7.0)} for n in (1, 2))
    fused = fuse(specs, [a, b])
    assert fused["w"][:, 0].tolist() == [1.0, 2.0, 2.0]
    assert fused["s"].item() == 7.0
