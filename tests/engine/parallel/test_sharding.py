from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.parallel.group import SoloGroup, TPGroup
from engine.parallel.sharding import features, rank_range
from engine.quant.base import Axis, ParamSpec

BLOCKS = ParamSpec((8, 6, 20), torch.uint8, out=Axis(0), inp=Axis(1, 32))


@given(st.sampled_from([1, 2, 3, 6]), st.sampled_from(["column", "row"]))
def test_slices_cover_the_tensor_once(size: int, split: str) -> None:
    t = torch.arange(6 * 6 * 2).view(6, 6, 2)
    spec = ParamSpec((6, 6, 2), torch.int64, out=Axis(0), inp=Axis(1, 32))
    total = 6 if split == "column" else 6 * 32
    parts = [features(t, spec, split, *rank_range(total, r, size, "x")) for r in range(size)]  # type: ignore[arg-type]
    assert torch.equal(torch.cat(parts, 0 if split == "column" else 1), t)


def test_a_slice_is_a_view_and_units_are_kept_whole() -> None:
    t = torch.zeros(8, 6, 20, dtype=torch.uint8)
    part = features(t, BLOCKS, "row", 64, 96)
    assert part.shape == (8, 3, 20)
    assert part.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()
    for start, length in ((16, 32), (0, 48)):
        with pytest.raises(ConfigError, match="32"):
            features(t, BLOCKS, "row", start, length)


def test_without_the_axis_a_tensor_is_whole_on_every_rank() -> None:
    scale = torch.ones(8)
    assert features(scale, ParamSpec((8,), torch.float32, out=Axis(0)), "row", 32, 32) is scale
    assert features(scale, ParamSpec((8,), torch.float32, out=Axis(0)), "none", 0, 4) is scale


def test_rank_range_names_what_does_not_divide() -> None:
    assert rank_range(9, 2, 3, "heads") == (6, 3)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 2 does not divide attention heads \(9\)"):
        rank_range(9, 0, 2, "attention heads")


def test_solo_group_changes_nothing() -> None:
    group: TPGroup = SoloGroup()
    x = torch.randn(2, 3)
    assert (group.rank, group.size) == (0, 1)
    assert group.all_reduce(x) is x and group.all_gather(x) is x and group.broadcast(x) is x
