from __future__ import annotations

import gc
import mmap
import weakref

import pytest
import torch

from engine.kernels.cpu import pages
from engine.kernels.cpu.pages import PAGE, LargePages, prefer_large_pages


def test_copies_lie_side_by_side_on_cache_lines():
    place = LargePages().place
    tensors = [torch.randn(3, 5), torch.randint(0, 9, (7,), dtype=torch.uint8), torch.randn(40).bfloat16()]
    placed = [place(t) for t in tensors]
    assert all(torch.equal(p, t) and p.dtype is t.dtype for p, t in zip(placed, tensors, strict=True))
    assert [p.data_ptr() - placed[0].data_ptr() for p in placed] == [0, 64, 128]
    assert placed[0].data_ptr() % PAGE == 0


def test_what_is_larger_than_a_chunk(monkeypatch):
    monkeypatch.setattr(pages, "_CHUNK", PAGE)
    held = LargePages()
    small, large = torch.arange(10), torch.arange(PAGE // 8 + 3)
    kept = [held.place(t) for t in (small, large, small)]
    assert all(torch.equal(a, b) for a, b in zip(kept, (small, large, small), strict=True))
    assert kept[1].data_ptr() % PAGE == 0


def test_memory_goes_with_its_last_tensor():
    held = LargePages()
    placed = held.place(torch.ones(4))
    gone = weakref.ref(placed.untyped_storage())
    del held, placed
    gc.collect()
    assert gone() is None


def test_a_transposed_tensor_and_an_empty_one():
    placed = LargePages().place(torch.arange(6).view(2, 3).T)
    assert placed.is_contiguous() and placed.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert LargePages().place(torch.empty(0, 4)).shape == (0, 4)


@pytest.mark.parametrize("size", [0, 100, PAGE, 3 * PAGE])
def test_advice_changes_no_value(size):
    tensor = torch.zeros(size, dtype=torch.uint8)
    prefer_large_pages(tensor)
    assert not tensor.any()


def test_systems_without_them(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert LargePages().place(torch.ones(3)).tolist() == [1, 1, 1]
    prefer_large_pages(torch.zeros(2 * PAGE, dtype=torch.uint8))
